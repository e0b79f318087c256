// Calls that go wrong on purpose, so that a failing, a hung and a dead stream can be shown to end requests cleanly.
#include <sys/syscall.h>
#include <unistd.h>

#include "moe_lightning.h"

int32_t mol_fault_error(const void*) { return MOL_ERROR_INJECTED; }

int32_t mol_fault_hang(const void*) {
  for (;;) pause();
}

// The bare system call: no destructor runs and nobody is told.
int32_t mol_fault_end_thread(const void*) {
  syscall(SYS_exit, 0);
  return MOL_ERROR_INJECTED;  // never reached
}
