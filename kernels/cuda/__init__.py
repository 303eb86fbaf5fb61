"""Sources of the kernels, one family a file: CUDA C++ that HIP takes too, compiled when a GPU first needs them."""
