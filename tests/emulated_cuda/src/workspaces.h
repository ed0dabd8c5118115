// Memory that cuBLAS keeps: one block for each handle and stream, from the first product of matrices there until it is
// asked for back. Each thread has a handle of its own, autograd's too.
#pragma once
#include <string>

#include "scheduler.h"

namespace emulated {

// An op is about to run on a stream; called once its results are allocated, as on CUDA.
void keep_workspace(const std::string& name, StreamKey stream);
void clear_workspaces();

}  // namespace emulated
