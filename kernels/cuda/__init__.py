"""CUDA C++ sources, one kernel family a file; compiled at run time by `headrace.kernels.cuda_module`."""
