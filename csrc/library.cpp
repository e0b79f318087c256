// Identity of the built library: the ABI it speaks and the sources it was made from.
#include "moe_lightning.h"

#ifndef MOL_SOURCE_HASH
#error "MOL_SOURCE_HASH is set by CMakeLists.txt"
#endif

int32_t mol_abi_version(void) { return MOL_ABI_VERSION; }

const char* mol_source_hash(void) { return MOL_SOURCE_HASH; }
