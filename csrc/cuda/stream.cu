// The state of a CUDA stream.
#include "launch.h"

namespace flashsoftmax::cuda {

bool is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check("capture status of the stream", cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status));
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace flashsoftmax::cuda
