"""LEO's inner loop and what is around it as CUDA kernels, for GPUs whose blocks form clusters: engines of `metaleo`."""

from metaleo_kernels.engines import Cuda as Cuda
from metaleo_kernels.engines import CudaMany as CudaMany
