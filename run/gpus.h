/* The GPUs of this machine, looked at in a child process: a process that has used CUDA cannot fork ranks. */
#ifndef MOEFLOW_RUN_GPUS_H
#define MOEFLOW_RUN_GPUS_H

#define GPUS_MAX 64

struct gpu {
  char name[96];
  int major, minor; /* compute capability */
};

struct gpus {
  int count;
  int driver;     /* CUDA version that the driver supports, 13000; 0 without one */
  char why[512];  /* count 0: why there is none */
  struct gpu gpu[GPUS_MAX];
};

/* Never fails: without a driver or a GPU count is 0. */
void gpus_probe(struct gpus *gpus);
#endif
