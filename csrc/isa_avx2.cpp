#define GRADWIRE_ISA avx2
#include "isa.h"
