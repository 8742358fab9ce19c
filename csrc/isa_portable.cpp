#define GRADWIRE_ISA portable
#include "isa.h"
