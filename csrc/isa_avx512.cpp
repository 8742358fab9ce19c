#define GRADWIRE_ISA avx512
#include "isa.h"
