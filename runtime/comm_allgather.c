/* The allgather transport, what engines do by themselves: each token's row goes once to all ranks, and home come the sums of
 * what the ranks have computed, added on the way. R rows a rank travel whatever the routing, and NCCL chooses the order of
 * the additions, each of them rounded to the return dtype. Works between processes and hosts. */
#include "nccl_comm.h"

static moeflow_status allgather_create(struct moeflow_group *group, const moeflow_group_config *config, struct comm **comm) {
  return nccl_comm_create(&comm_allgather, group, config, comm);
}

static ncclResult_t gather_rows(const struct nccl_exchange *exchange, ncclComm_t comm, cudaStream_t stream) {
  return nccl.ncclAllGather(exchange->send, exchange->receive, exchange->bytes, ncclInt8, comm, stream);
}

static ncclResult_t add_sums(const struct nccl_exchange *exchange, ncclComm_t comm, cudaStream_t stream) {
  const size_t count = exchange->bytes / (exchange->type == ncclFloat32 ? 4 : 2);
  return nccl.ncclReduceScatter(exchange->send, exchange->receive, count, exchange->type, ncclSum, comm, stream);
}

static moeflow_status allgather_exchange(struct comm *comm, struct group_lane *lane, enum moeflow_phase phase, int rows,
                                         int64_t row_bytes, void *stream) {
  const struct moeflow_group *group = nccl_comm_of(comm)->group;
  struct nccl_exchange exchange = {
      .name = "ncclAllGather",
      .enqueue = gather_rows,
      .send = lane->send,
      .receive = lane->received,
      .bytes = (size_t)(rows * row_bytes),
      .ranks = group->ranks,
  };
  if (phase == MOEFLOW_PHASE_RETURN) {
    exchange.name = "ncclReduceScatter";
    exchange.enqueue = add_sums;
    exchange.send = lane->return_send;
    exchange.receive = lane->returned;
    exchange.type = group->contexts[0]->plan.spec.returned == SPEC_WIRE_FP32 ? ncclFloat32 : ncclBfloat16; /* as of all */
  }
  return nccl_comm_exchange(comm, lane, &exchange, stream);
}

const struct comm_ops comm_allgather = {
    .name = "allgather",
    .over_nccl = 1,
    .broadcast = 1,
    .create = allgather_create,
    .destroy = nccl_comm_destroy,
    .gather = nccl_comm_gather,
    .attach = nccl_comm_attach,
    .exchange = allgather_exchange,
    .health = nccl_comm_health,
    .abort = nccl_comm_abort,
    .connect = nccl_comm_connect,
};
