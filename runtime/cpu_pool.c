#include "cpu_pool.h"

#include <pthread.h>
#include <stdlib.h>

#include "status.h"

struct job { /* on the caller's stack while it waits */
  void (*run)(void *argument, int64_t unit);
  void *argument;
  int64_t units, next;
  int helpers, helpers_max; /* workers inside, and the most there may be */
  struct job *link;
};

struct cpu_pool {
  pthread_mutex_t mutex;
  pthread_cond_t work;  /* a job came, or the pool closes */
  pthread_cond_t ended; /* a helper left its job */
  struct job *jobs;
  int closing;
  int workers;
  pthread_t threads[];
};

/* With the mutex held: takes units until none is left. */
static void take_units(struct cpu_pool *pool, struct job *job) {
  while (job->next < job->units) {
    const int64_t unit = job->next++;
    pthread_mutex_unlock(&pool->mutex);
    job->run(job->argument, unit);
    pthread_mutex_lock(&pool->mutex);
  }
}

static struct job *open_job(struct cpu_pool *pool) {
  for (struct job *job = pool->jobs; job; job = job->link) {
    if (job->next < job->units && job->helpers < job->helpers_max) return job;
  }
  return NULL;
}

static void *worker(void *argument) {
  struct cpu_pool *pool = argument;
  pthread_mutex_lock(&pool->mutex);
  while (!pool->closing) {
    struct job *job = open_job(pool);
    if (!job) {
      pthread_cond_wait(&pool->work, &pool->mutex);
      continue;
    }
    job->helpers++;
    take_units(pool, job);
    job->helpers--;
    pthread_cond_broadcast(&pool->ended);
  }
  pthread_mutex_unlock(&pool->mutex);
  return NULL;
}

moeflow_status cpu_pool_create(int workers, struct cpu_pool **result) {
  struct cpu_pool *pool = calloc(1, sizeof *pool + (size_t)workers * sizeof pool->threads[0]);
  if (!pool) return status_set(MOEFLOW_ERROR_MEMORY, "no memory for a pool of %d threads", workers);
  pthread_mutex_init(&pool->mutex, NULL);
  pthread_cond_init(&pool->work, NULL);
  pthread_cond_init(&pool->ended, NULL);
  while (pool->workers < workers && pthread_create(&pool->threads[pool->workers], NULL, worker, pool) == 0) pool->workers++;
  *result = pool;
  return MOEFLOW_OK;
}

void cpu_pool_destroy(struct cpu_pool *pool) {
  if (!pool) return;
  pthread_mutex_lock(&pool->mutex);
  pool->closing = 1;
  pthread_cond_broadcast(&pool->work);
  pthread_mutex_unlock(&pool->mutex);
  for (int t = 0; t < pool->workers; t++) pthread_join(pool->threads[t], NULL);
  pthread_cond_destroy(&pool->ended);
  pthread_cond_destroy(&pool->work);
  pthread_mutex_destroy(&pool->mutex);
  free(pool);
}

void cpu_pool_run(struct cpu_pool *pool, int threads, int64_t units, void (*run)(void *argument, int64_t unit),
                  void *argument) {
  if (!pool || threads < 2 || units < 2) {
    for (int64_t unit = 0; unit < units; unit++) run(argument, unit);
    return;
  }
  struct job job = {run, argument, units, 0, 0, threads - 1, NULL};
  pthread_mutex_lock(&pool->mutex);
  job.link = pool->jobs;
  pool->jobs = &job;
  pthread_cond_broadcast(&pool->work);
  take_units(pool, &job);
  while (job.helpers > 0) pthread_cond_wait(&pool->ended, &pool->mutex);
  struct job **at = &pool->jobs;
  while (*at != &job) at = &(*at)->link;
  *at = job.link;
  pthread_mutex_unlock(&pool->mutex);
}
