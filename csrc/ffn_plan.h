// Which tokens go to which expert, in which pieces, and the memory for it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ffn.h"

namespace mol {

// Kept from call to call, since fresh memory costs a page fault for every 4 KB.
class FfnWorkspace {
 public:
  // The plan points into the workspace, and to the task. Throws std::bad_alloc.
  FfnPlan plan(const mol_expert_ffn_task& task, const FfnKernel& kernel, int num_threads);

 private:
  struct Free {
    void operator()(char* memory) const;
  };

  void find_slots(const mol_expert_ffn_task& task);
  char* reserve(size_t num_bytes);

  std::vector<int64_t> expert_slots_;  // [E] first the number of an expert's slots, then where its next one goes
  std::vector<int64_t> token_slots_;
  std::vector<int32_t> slot_tokens_;
  std::vector<FfnBlock> blocks_;
  std::vector<FfnExpert> experts_;
  std::unique_ptr<char[], Free> memory_;
  size_t num_bytes_ = 0;
};

}  // namespace mol
