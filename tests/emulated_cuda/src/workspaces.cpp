#include "workspaces.h"

#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "device_memory.h"
#include "settings.h"

namespace emulated {

namespace {

struct Known {
  std::mutex mutex;
  std::map<std::pair<int, StreamKey>, void*> blocks;
  std::vector<int> free_handles;
  int num_handles = 0;
};

// Never destroyed: autograd's threads give their handles back while the process ends.
Known& known() {
  static auto* known = new Known;
  return *known;
}

// A handle is for one thread at a time, and for another one afterwards.
struct Handle {
  Handle() {
    std::lock_guard lock(known().mutex);
    auto& free = known().free_handles;
    if (free.empty()) free.push_back(known().num_handles++);
    index = free.back();
    free.pop_back();
  }
  ~Handle() {
    std::lock_guard lock(known().mutex);
    known().free_handles.push_back(index);
  }
  int index;
};

bool multiplies_matrices(const std::string& name) {
  static const std::set<std::string> names = {"aten::mm",      "aten::addmm",      "aten::bmm",  "aten::baddbmm",
                                              "aten::addbmm",  "aten::addmv",      "aten::dot",  "aten::_addmm_activation",
                                              "aten::vdot",    "aten::addr"};
  return names.count(name) > 0;
}

}  // namespace

void keep_workspace(const std::string& name, StreamKey stream) {
  static const auto num_bytes = static_cast<size_t>(number_setting("EMULATED_CUDA_WORKSPACE_BYTES", 0));
  if (!num_bytes || !multiplies_matrices(name)) return;
  thread_local Handle handle;
  std::lock_guard lock(known().mutex);
  auto key = std::make_pair(handle.index, stream);
  auto& blocks = known().blocks;
  if (!blocks.count(key)) blocks[key] = DeviceMemory::of(device_of(stream)).allocate(num_bytes, stream);
}

void clear_workspaces() {
  std::lock_guard lock(known().mutex);
  auto& blocks = known().blocks;
  for (auto& [key, address] : blocks) DeviceMemory::of(device_of(key.second)).release(address);
  blocks.clear();
}

}  // namespace emulated
