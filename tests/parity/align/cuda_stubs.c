/* Functions of CUDA that torchaudio's compiled parts name. None is called on a CPU, except those that register kernels. */
static void *handle[64];
void **__cudaRegisterFatBinary(void *binary) { return handle; }
void __cudaRegisterFatBinaryEnd(void **of) {}
void __cudaUnregisterFatBinary(void **of) {}
void __cudaRegisterFunction(void) {}
void __cudaRegisterVar(void) {}
int __cudaGetKernel(void) { return 1; }
int __cudaLaunchKernel(void) { return 1; }
int __cudaPopCallConfiguration(void) { return 1; }
int __cudaPushCallConfiguration(void) { return 1; }
int cudaGetLastError(void) { return 1; }
int cudaMemcpyAsync(void) { return 1; }
int cudaMemset(void) { return 1; }
int cudaSetDevice(void) { return 1; }
int aoti_torch_get_current_cuda_stream(void) { return 1; }
int torch_c10_cuda_check_msg(void) { return 1; }
int torch_c10_cuda_free_error_msg(void) { return 1; }
int torch_cuda_stream_synchronize(void) { return 1; }
int torch_get_cuda_stream_from_pool(void) { return 1; }
int torch_set_current_cuda_stream(void) { return 1; }
