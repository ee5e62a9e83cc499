/* The nccl transport: one all-to-all out, one back, each lane on a communicator of its own. Works between processes and
 * hosts. */
#include <string.h>

#include "nccl_comm.h"

moeflow_status comm_nccl_unique_id(moeflow_unique_id *id) {
  moeflow_status status = MOEFLOW_OK;
  ncclUniqueId made;
  _Static_assert(sizeof made == sizeof *id, "an NCCL id is a moeflow id");
  CHECK(nccl_load());
  CHECK_NCCL(NULL, ncclGetUniqueId(&made));
  memcpy(id, &made, sizeof made);
cleanup:
  return status;
}

int comm_nccl_version(void) {
  return nccl.version;
}

static moeflow_status nccl_create(struct moeflow_group *group, const moeflow_group_config *config, struct comm **comm) {
  return nccl_comm_create(&comm_nccl, group, config, comm);
}

static ncclResult_t all_to_all(const struct nccl_exchange *exchange, ncclComm_t comm, cudaStream_t stream) {
  const size_t bytes = exchange->bytes;
  if (nccl.ncclAlltoAll) return nccl.ncclAlltoAll(exchange->send, exchange->receive, bytes, ncclInt8, comm, stream);
  ncclResult_t result = nccl.ncclGroupStart();
  for (int p = 0; p < exchange->ranks && result == ncclSuccess; p++) {
    result = nccl.ncclSend(exchange->send + (size_t)p * bytes, bytes, ncclInt8, p, comm, stream);
    if (result != ncclSuccess) break;
    result = nccl.ncclRecv(exchange->receive + (size_t)p * bytes, bytes, ncclInt8, p, comm, stream);
  }
  ncclResult_t end = nccl.ncclGroupEnd();
  return result == ncclSuccess ? end : result;
}

static moeflow_status nccl_exchange(struct comm *comm, struct group_lane *lane, enum moeflow_phase phase, int rows,
                                    int64_t row_bytes, void *stream) {
  const int out = phase == MOEFLOW_PHASE_DISPATCH;
  const struct nccl_exchange exchange = {
      .name = "ncclAlltoAll",
      .enqueue = all_to_all,
      .send = out ? lane->send : lane->return_send,
      .receive = out ? lane->received : lane->returned,
      .bytes = (size_t)(rows * row_bytes),
      .ranks = nccl_comm_of(comm)->group->ranks,
  };
  return nccl_comm_exchange(comm, lane, &exchange, stream);
}

const struct comm_ops comm_nccl = {
    .name = "nccl",
    .over_nccl = 1,
    .create = nccl_create,
    .destroy = nccl_comm_destroy,
    .gather = nccl_comm_gather,
    .attach = nccl_comm_attach,
    .exchange = nccl_exchange,
    .health = nccl_comm_health,
    .abort = nccl_comm_abort,
    .connect = nccl_comm_connect,
};
