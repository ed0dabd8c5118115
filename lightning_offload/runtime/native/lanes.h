// Copies between a device and host memory whose address Python tells: the lanes of stream_lanes.py, and what cpu_lanes.py
// copies in the thread that asks, by the same rules. Blocks, and the pools that they come from, are Python's.
//
// Threads: a copy is asked for with the mutex of all steps held (Note [Locks] in step.h) or by Python, so what lanes have
// under way is guarded by a mutex of its own. Nobody blocks while holding that one.
#pragma once

#include "state.h"

#include <c10/core/Event.h>

#include <deque>
#include <mutex>

namespace offload {

class Lanes;

// A copy on a side stream. See StreamCopy.
struct Copy final : c10::intrusive_ptr_target {
  Copy(std::shared_ptr<Lanes> lanes, c10::Event event, c10::Stream owner, StoragePtr storage)
      : lanes(std::move(lanes)), event(std::move(event)), owner(owner), storage(std::move(storage)) {}
  void release_resources() override {
    storage.reset();
  }
  ~Copy() override;

  // Let what compute does from here on see the copy as done; blocks no thread.
  void wait();
  // Block until it is done; for a thread without the GIL.
  void synchronize();

  std::shared_ptr<Lanes> lanes;
  c10::Event event;
  c10::Stream owner;   // that computed when the copy was asked for
  StoragePtr storage;  // the device memory it uses, until it is done or compute waits for it; guarded by its lanes' mutex
};
using CopyPtr = c10::intrusive_ptr<Copy>;

// What lanes did since they were last asked; bytes and seconds. See LaneTimes.
struct LaneTimes {
  int64_t out_bytes = 0;
  double out_seconds = 0;
  int64_t in_bytes = 0;
  double in_seconds = 0, stall_seconds = 0;
};

class Lanes : public std::enable_shared_from_this<Lanes> {
 public:
  // Those of an accelerator: by a side stream for each direction. `done` is Python's copy that is done.
  Lanes(c10::Stream out, c10::Stream in, PyObject* done);
  // Those of a CPU, for copies of at most so many bytes: larger ones are other threads'.
  Lanes(int64_t most_bytes, PyObject* done);

  // Whether copies of a size are made here.
  bool takes(int64_t num_bytes) const {
    return !device.is_cpu() || num_bytes <= most_bytes_;
  }
  // Start copying; Python's object for the copy. The block is a HostBlock, whose earlier users the copy comes after, and
  // which knows of it from then on. With the GIL.
  PyRef swap_out(const StoragePtr& storage, PyObject* block, int64_t address, int64_t num_bytes);
  PyRef swap_in(PyObject* block, int64_t address, const StoragePtr& storage, int64_t num_bytes);
  // Let compute go on only after a copy; false where that is Python's.
  bool wait(PyObject* copy) const;
  bool is_done(PyObject* copy) const {
    return copy == done_.get();
  }
  // Tell the allocator that the stream that computes now uses memory, which may be another stream's.
  void note_use(const c10::StorageImpl& storage) const;
  // See Copy::wait.
  void let_compute_wait(const Copy& copy);
  // The memory that a copy holds; it holds it no longer.
  StoragePtr held_by(const Copy& copy);
  StoragePtr let_go(Copy& copy);

  // As the methods of CopyLanes; those that wait are for threads without the GIL.
  void measure(bool is_on);
  void tidy();
  void settle();
  void drain();
  LaneTimes take_times();

  const c10::Device device;

 private:
  struct Direction {
    std::optional<c10::Stream> stream;
    std::deque<CopyPtr> under_way;
    struct Timed {
      c10::Event before, after;
      int64_t num_bytes;
    };
    std::vector<Timed> timed;
    int64_t num_bytes = 0;  // copied by the thread that asks
    double seconds = 0;
  };
  PyRef copy(
      Direction& direction, PyObject* block, const StoragePtr& storage, int64_t address, int64_t num_bytes);
  void issue(Direction& direction, const CopyPtr& copy, int64_t address, int64_t num_bytes);
  void copy_here(Direction& direction, const StoragePtr& storage, int64_t address, int64_t num_bytes);
  std::optional<c10::Event> timestamp(const c10::Stream& stream) const;
  std::vector<CopyPtr> all_under_way(bool is_taken);
  // What held its memory, which dies with it: not under the mutex, since whoever hears of events may want the GIL.
  struct Done {
    StoragePtr storage;
    CopyPtr copy;
  };
  std::vector<Done> forget_done();

  int64_t most_bytes_ = 0;
  PyRef done_;
  std::atomic<bool> is_measuring_ = false;
  std::mutex mutex_;
  Direction out_, in_;
  std::vector<std::pair<c10::Event, c10::Event>> stalls_;
};

// Device memory of a size: never filled, as deterministic mode fills tensors, and allocated on the stream that computes.
StoragePtr new_device_memory(int64_t num_bytes, c10::Device device);

// What Python's object for a copy stands for: null where that is none of ours; and the object for one.
Copy* copy_of(PyObject* object);
PyRef wrapped(CopyPtr copy);

[[noreturn]] void throw_python_error();

}  // namespace offload
