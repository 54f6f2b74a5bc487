/* The threads of PyTorch's operators: those of the OpenMP library that PyTorch has loaded, which kernels share. */
#pragma once

extern void GOMP_parallel(void (*run)(void *), void *data, unsigned threads, unsigned flags);
extern void GOMP_barrier(void);
extern int omp_get_thread_num(void);
extern int omp_get_num_threads(void);
