"""Run-time compilation, dispatch and launching of GPU kernels."""
