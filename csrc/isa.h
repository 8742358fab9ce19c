// All kernels for the instruction set this file is compiled for; GRADWIRE_ISA names it.
#include "blocks.h"
#include "lowrank.h"
#include "rotation.h"
#include "selection.h"

namespace gradwire::GRADWIRE_ISA {

#define GRADWIRE_TEXT(x) #x
#define GRADWIRE_NAME(x) GRADWIRE_TEXT(x)
const Kernels kernels = {
    GRADWIRE_NAME(GRADWIRE_ISA), encode_range,     decode_range, accumulate_range, divide_range,
    clean_range,                 random_range,     pack_range,   unpack_range,     find_range,
    histogram_range,             block_top_range,  rotate_range, thin_range,       thin_transposed_range,
    outer_range,                 mean_range,
};

}  // namespace gradwire::GRADWIRE_ISA
