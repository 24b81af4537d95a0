/* The C API of libcgx: all that the bindings (torch_ops/, xla_ffi/, cgx_ops/_core/) may call.
 *
 *   1. status codes, the field at fault and the error text: status.h
 *   2. the process: init, finalize, describe
 *   3. communicators, as small integers in one process-wide registry
 *   4. collectives: start, test, notify, wait; how their values travel: config.h
 *   5. an allreduce whose bytes the caller carries: torch's or XLA's own collectives
 *   6. arithmetic on one rank: exact sums; the codec alone, for tests and tools
 *
 * In C++ face.h comes with it.
 *
 * No exception crosses this border: every function returns a status, and the text of the calling
 * thread's last failure is cgx_last_error(). Structs begin with struct_size = sizeof(the struct),
 * which tells callers that were built for another one; cgx_config_t and cgx_segment_t are parts of
 * such structs. */
#ifndef CGX_CGX_H_
#define CGX_CGX_H_

#include <stddef.h>
#include <stdint.h>

#include "cgx/config.h"
#include "cgx/status.h"

#define CGX_VERSION "0.1.0"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- 2. the process ----------------------------------------------------------------------- */

/* What this build has, as JSON: {"version", "cpu_target", "cpu_targets": [...],
 * "transports" | "wires" | "compressors" | "algorithms": [{"name", "description"}], "cuda":
 * {"built", "driver", "devices": [{"name", "capability", "memory_gib"}]}}. Starts nothing. *text is
 * valid until this thread's next cgx_describe. */
CGX_API cgx_status_t cgx_describe(const char** text);

/* The MPI library, as JSON: {"library", "cuda_aware"}. Loads it, but does not start MPI. "library"
 * is its version line. *text is valid until this thread's next cgx_describe_mpi. */
CGX_API cgx_status_t cgx_describe_mpi(const char** text);

/* The path of libmpi.so.40. It is loaded when cgx_init or cgx_describe_mpi needs it. Without this
 * call the dynamic linker finds it. */
CGX_API cgx_status_t cgx_set_mpi_path(const char* path);

/* Starts MPI if this process was launched by mpirun (or somebody already started MPI), and makes
 * the communicator "world". Without mpirun the world has one rank and needs no MPI. Idempotent. */
CGX_API cgx_status_t cgx_init(int32_t* world);

/* Waits until no collective of this process is in flight on CPUs. Their deadlines bound it. Call it
 * before cgx_finalize, so that peers get the results of what this process has started. Does nothing
 * in a forked child. */
CGX_API cgx_status_t cgx_finish(void);

/* Closes every communicator and finalizes MPI if cgx started it. Bounded in time; idempotent.
 * Call it from the interpreter's atexit. Does nothing in a forked child. */
CGX_API cgx_status_t cgx_finalize(void);

/* ---- 3. communicators --------------------------------------------------------------------- */

/* Every rank gives `bytes` bytes and receives all ranks' blobs in rank order. Returns 0, or not. */
typedef int (*cgx_allgather_t)(void* context, const void* mine, size_t bytes, void* all);

typedef struct cgx_bootstrap_t {
  size_t struct_size;
  int32_t rank;
  int32_t size;
  cgx_allgather_t allgather;
  void* context;         /* passed to allgather; not used after cgx_comm_create returns */
  const char* name;      /* unique among this process's live communicators; "world" becomes what
                          * cgx_init returns */
  const char* transport; /* "AUTO", "SHM", "MPI", "TCP", "NCCL" (between GPUs; else as AUTO);
                          * NULL: COMMUNICATOR_TYPE, else AUTO */
  double timeout_s;      /* default deadline of its collectives; <= 0: CGX_TIMEOUT, else 300 */
  /* The rank in the noise's counter, >= 0; NULL: `rank`. Where groups of one job have equal seeds,
   * ranks of different numbers draw different noise: give the rank in the whole job. What
   * cgx_comm_split and cgx_comm_group make keeps its ranks' numbers. */
  const int32_t* noise_rank;
} cgx_bootstrap_t;

typedef struct cgx_comm_info_t {
  size_t struct_size;
  int32_t rank;
  int32_t size;
  int32_t closed;        /* 1 after a failure or cgx_comm_close */
  const char* name;      /* valid until this thread's next cgx_comm_info */
  const char* transport; /* "self", or a row of the transports that cgx_describe lists */
  int64_t bytes_sent;    /* what this rank handed to peers since creation, headers included */
  int64_t collectives;   /* completed without error since creation */
  /* Of those `collectives`, on this rank, summed. They overlap, so the times may exceed the
   * clock's. One rank alone sends nothing: it copies, which counts as move_ns. */
  int64_t bytes_in;    /* of the segments' values in `input`, as they were given */
  int64_t agree_ns;    /* from the start until every rank's header was here and equal */
  int64_t move_ns;     /* from then until the end: callbacks and waiters not included */
  int64_t compute_ns;  /* of both, inside the algorithm: encode, sum, decode, hand over */
  int64_t bytes_plain; /* what they would send uncompressed, by the algorithms that send least, for
                        * n ranks: bytes_in times 2(n-1)/n (allreduce), (n-1)/n (reduce_scatter) or
                        * n-1 (all_gather) */
  /* How its ranks' devices are connected: "direct", "mpi", "staged", "nccl"; "" before the first
   * cgx_enqueue. Collectives on devices count in none of the sums above. */
  const char* wire;
  int32_t host;  /* this rank's, of `hosts`, which are numbered in the order of their first ranks */
  int32_t hosts; /* fewer than ranks: some share one */
  /* Connections that were refused while its ranks met by TCP: whoever made them did not know the
   * communicator's key, or stood for a rank that was there already. */
  int64_t strangers;
} cgx_comm_info_t;

/* What this process has sent since it started, summed; the bytes as in cgx_comm_info_t. */
typedef struct cgx_traffic_t {
  size_t struct_size;
  int64_t collectives;
  int64_t bytes_in;
  int64_t bytes_plain;
  int64_t bytes_sent;
} cgx_traffic_t;

/* Collective over the ranks of the bootstrap. */
CGX_API cgx_status_t cgx_comm_create(const cgx_bootstrap_t* bootstrap, int32_t* comm);
/* `size` ranks inside this process, to be used by `size` threads; comms[i] is rank i, named
 * "<name>/<i>". */
CGX_API cgx_status_t cgx_comm_create_local(int32_t size, const char* name, double timeout_s,
                                           int32_t* comms);
/* Collective over comm: ranks with equal color form a communicator, ordered by (key, rank). A
 * negative color joins none and gets *out = -1. `name` must be equal on all ranks of comm: the
 * calls are matched by it, so that splits may start in any order. It is the communicator's name; of
 * ranks that are threads, "<name>/<rank in comm>". */
CGX_API cgx_status_t cgx_comm_split(int32_t comm, int32_t color, int32_t key, const char* name,
                                    int32_t* out);
/* Collective over the listed ranks of comm only; ranks[i] becomes rank i. Names as in split. */
CGX_API cgx_status_t cgx_comm_group(int32_t comm, const int32_t* ranks, int32_t num_ranks,
                                    const char* name, int32_t* out);
CGX_API cgx_status_t cgx_comm_find(const char* name, int32_t* comm);
/* The communicator with the smallest id above `after`, or -1: start with after = -1 to list all. */
CGX_API cgx_status_t cgx_comm_next(int32_t after, int32_t* comm);
CGX_API cgx_status_t cgx_comm_info(int32_t comm, cgx_comm_info_t* info);
/* Over all communicators, closed ones too, and all that callers have carried. */
CGX_API cgx_status_t cgx_traffic(cgx_traffic_t* traffic);
/* Looks for lost ranks, no longer than `seconds`. CGX_PEER_FAILED: ranks, or the communicator, are
 * lost; cgx_last_error() names them. For errors of another library among the same ranks. */
CGX_API cgx_status_t cgx_comm_find_lost(int32_t comm, double seconds);
/* Waits (bounded) until peers have read what was sent to them, then frees. Not collective. */
CGX_API cgx_status_t cgx_comm_close(int32_t comm);

/* ---- 4. collectives ----------------------------------------------------------------------- */

/* verb.h has their table. */
typedef enum cgx_verb_t {
  CGX_ALLREDUCE = 0,
  CGX_REDUCE_SCATTER = 1,
  CGX_ALL_GATHER = 2
} cgx_verb_t;
/* That table as JSON, in the order of cgx_verb_t: [{"id", "name", "blocks_in" | "blocks_out":
 * whether the buffer holds a block for each rank, "shards": neither does, "reduces": whether op
 * counts, "scatters" | "gathers": the encoded stages, "lists": whether it takes inputs and outputs,
 * "residuals": "", "cpu" or "any", "algorithm": "auto" or the only one that serves it}, ...]. */
CGX_API const char* cgx_verbs(void);
typedef enum cgx_device_t { CGX_CPU = 0, CGX_CUDA = 1 } cgx_device_t;

/* A run of elements with its own compression. Bucket grid, minimal_size and noise index restart at
 * each segment. Segments must not overlap. */
typedef struct cgx_segment_t {
  int64_t offset;      /* elements from the start of the buffer (or of a rank's block) */
  int64_t numel;       /* >= 0 */
  int64_t bucket_size; /* its own, and so are its bits: those of the call's config do not count */
  int32_t bits;
  /* 1: CGX_AUTO does not count it when it measures the message. So each example of a vmap is
   * reduced as if it were alone. */
  int32_t repeats;
  /* How else it travels, but for the algorithm: the rest of it counts. NULL: as the call's. */
  const cgx_config_t* config;
} cgx_segment_t;

typedef struct cgx_collective_t {
  size_t struct_size;
  int32_t comm;
  int32_t verb;
  int32_t dtype;
  int32_t op; /* bits < 32: sum and avg only. Ignored where nothing is reduced */
  cgx_config_t config;
  /* Of stochastic and shift rounding; ranks need not agree on it, unless the compressor is randk.
   * Each segment, and each block of a reduce_scatter, has noise of its own that follows from it. */
  int64_t seed;
  /* Each holds one block of block_numel elements or, where verb.h says so, one for each rank.
   * Segments lie inside a block. allreduce: output may be input. */
  const void* input;
  void* output;
  int64_t block_numel; /* 0: where the last segment ends */
  const cgx_segment_t* segments;
  int64_t num_segments;
  const char* name; /* NULL or "": calls match in the communicator's program order */
  /* n-th use of the name, counted from 0; < 0: counted by the communicator. Set -1 unless you
   * count. */
  int64_t occurrence;
  double timeout_s; /* <= 0: the communicator's */
  /* allreduce only, one pointer per segment: where its values are, wherever that is, instead of
   * `input` and `output` with the segments' offsets. NULL, both: as above. */
  const void* const* inputs;
  void* const* outputs;
  const int64_t* seeds; /* one per segment, used as they are; NULL: they follow from `seed` */
  /* Error feedback, of allreduce and reduce_scatter, for sums and averages only; one pointer per
   * segment, or NULL: a segment whose pointer is null has none. A residual is in the values' dtype
   * and is read and written in place. It is added, in fp32, to this rank's values, and becomes what
   * is lost of them now: by this rank's encoding of them, and, of the elements that this rank
   * reduces, by its encoding of the sum (in units of the sum, also if op is avg). So over all ranks
   * inputs and old residuals are the result (as a sum) and new residuals, but for what fp32 sums
   * and the dtype round. A loss that is not finite becomes 0. Undefined after a failure.
   * reduce_scatter: a pointer leads to the residual of a segment's values in the first block; those
   * in the next begin block_numel elements further, and so on. On the CPU only. */
  void* const* residuals;
  int64_t divisor; /* of avg; 0: the number of ranks */
  int32_t device;  /* a cgx_device_t: where all buffers are */
  /* The number of the launch that makes the call, where a runtime numbers a program's launches
   * alike on all ranks; 0: none does. A rank whose launch has failed may have left calls out, and
   * would give a later launch's values for an earlier one: that is a mismatch. */
  int32_t launch;
  void* stream; /* CGX_CUDA: the cudaStream_t that the work is put on; NULL: the default stream */
  const int64_t*
      device_seeds;           /* CGX_CUDA: one per segment, in the GPU's memory, instead of seeds */
  const int64_t* device_seed; /* CGX_CUDA: one, in the GPU's memory, instead of seed */
  const int32_t* noise_rank;  /* as in cgx_bootstrap_t; NULL: the communicator's */
} cgx_collective_t;

typedef struct cgx_request_t cgx_request_t;

/* Called once, from some thread that must not be blocked (the progress thread, a waiter, or the
 * caller of the function that it was given to): `message` is valid during the call and "" on
 * success. */
typedef void (*cgx_callback_t)(void* context, cgx_status_t status, const char* message);

/* Never blocks on a peer. Buffers, not the structs, must outlive the collective. With a callback
 * the collective owns itself and request must be NULL; without one *request must be given to
 * cgx_wait. A failure returned here means that nothing was started and callback will not be called.
 */
CGX_API cgx_status_t cgx_start(const cgx_collective_t* collective, cgx_callback_t callback,
                               void* context, cgx_request_t** request);
CGX_API cgx_status_t cgx_test(cgx_request_t* request, int32_t* done);
/* Has callback called when the collective ends; at once, on this thread, if it has. Once per
 * request (then CGX_INVALID_ARGUMENT), which must still be given to cgx_wait, after this has
 * returned or from what callback sets off, on another thread; cgx_wait returns after the callback
 * has. */
CGX_API cgx_status_t cgx_notify(cgx_request_t* request, cgx_callback_t callback, void* context);
/* Blocks until the collective ends (its deadline bounds this) and frees the request. */
CGX_API cgx_status_t cgx_wait(cgx_request_t* request);
/* cgx_start and cgx_wait in one: spares waking the progress thread. */
CGX_API cgx_status_t cgx_run(const cgx_collective_t* collective);
/* For callers that have to look up now and then, as Python has for signals. Blocks until the
 * collective ends or `seconds` (0 to 1e8) have passed, and says in *done which. It does not free
 * the request: every call after the end returns the same status, from any number of threads. */
CGX_API cgx_status_t cgx_wait_for(cgx_request_t* request, double seconds, int32_t* done);
/* cgx_start and cgx_wait_for in one, as cgx_run is. *request is NULL if the collective has ended,
 * or has failed to start; else it goes on, and *request must be given to cgx_wait. */
CGX_API cgx_status_t cgx_run_for(const cgx_collective_t* collective, double seconds,
                                 cgx_request_t** request);

/* The same on a GPU (device is CGX_CUDA; the functions above are for CGX_CPU). Puts the collective
 * on call->stream and returns: it waits for neither the device nor peers, but for a communicator's
 * first such call, which connects the ranks' devices. (Where NCCL or MPI carries the messages each
 * call waits on the host until all ranks have made it, and with MPI for the stream and until the
 * messages have come; for peers never longer than its timeout at a time.) Results are there for
 * what is put on the stream later, or waits for it; inputs must stay until then, in no other way
 * than with any kernel.
 *
 * All such collectives of a communicator run one after another, in the order of these calls, which
 * must be the same on all ranks; other order or arguments are CGX_MISMATCH. A rank's buffers are
 * all on one GPU, in every call on the communicator. Where the devices are connected directly the
 * stream may be recording a CUDA graph; its replays are ordered with other collectives on the
 * communicator by who replays it, alike on all ranks, and have ended before that is closed.
 *
 * What fails later (a deadline, a lost peer, a mismatch) writes NaN, on the stream, to what is not
 * reduced yet (long messages go in rounds), and closes the communicator for devices: the next
 * cgx_enqueue, and cgx_comm_check, return it. */
CGX_API cgx_status_t cgx_enqueue(const cgx_collective_t* collective);
/* What collectives put on devices have failed with, as far as is known now; CGX_OK if none has.
 * With `finish` not 0 waits for all of them to end first. */
CGX_API cgx_status_t cgx_comm_check(int32_t comm, int32_t finish);
/* Whether what is put on a stream of the thread's current GPU is recorded into a CUDA graph. */
CGX_API cgx_status_t cgx_stream_recording(void* stream, int32_t* recording);

/* Tells every peer that this rank will not take part in the collective that `collective` identifies
 * by comm, name and occurrence (the rest is ignored): theirs ends with `status` and a text that
 * carries `message`, once all ranks have started or refused it. It uses the key up, and never
 * blocks. The communicator stays open. */
CGX_API cgx_status_t cgx_refuse(const cgx_collective_t* collective, cgx_status_t status,
                                const char* message);

/* What cgx_start would do: the algorithm it picks and the bytes this rank would send. */
typedef struct cgx_plan_t {
  size_t struct_size;
  int32_t algorithm;
  int32_t reserved;
  int64_t payload_bytes; /* encoded values sent by this rank, over all peers */
  int64_t exact_bytes;   /* the same with 32 bits everywhere */
} cgx_plan_t;
CGX_API cgx_status_t cgx_plan(const cgx_collective_t* collective, cgx_plan_t* plan);

/* ---- 5. an allreduce that the caller carries ------------------------------------------------ */

/* The steps of an allreduce between its exchanges, for callers who move bytes themselves: same bits
 * as cgx_run, same bytes. call->comm and call->name are ignored, call->verb must be allreduce and
 * the algorithm auto, one_shot or sra. `rank` and `size` are the caller's own; call->noise_rank is
 * `rank` if NULL.
 *
 *   sra       encode -> all-to-all (rank p gets scatter_bytes[p] from each other rank, nothing from
 *             itself) -> reduce -> all-gather (gather_bytes[p] from rank p) -> decode
 *   one_shot  encode -> all-gather (gather_bytes, equal everywhere) -> decode, which sums
 *
 * One rank alone carries nothing: decode copies input to output.
 *
 * Messages lie end to end in rank order. In the input of decode they lie equally far apart, at
 * least as far as the longest is long.
 *
 * No header tells what ranks have in common: that all make the same call is the caller's word, but
 * for the seeds of places that they draw (CGX_RANDK), of which the messages of encode carry a hash.
 * Where these differ, reduce, or one_shot's decode, fails with CGX_MISMATCH on every rank. */
typedef struct cgx_carried_t {
  size_t struct_size;
  int32_t rank;
  int32_t size;
  const cgx_collective_t* call;
} cgx_carried_t;

/* Which algorithm it is (resolved from auto), and bytes[size] each. one_shot: scatter_bytes are 0.
 */
CGX_API cgx_status_t cgx_carried_plan(const cgx_carried_t* carried, int32_t* algorithm,
                                      int64_t* scatter_bytes, int64_t* gather_bytes);
/* Reads call->input; writes the messages for the other ranks, or one_shot's one message for all.
 * `bytes`: at least theirs; the rest becomes zero, as all that is sent but not said. */
CGX_API cgx_status_t cgx_carried_encode(const cgx_carried_t* carried, void* messages,
                                        int64_t bytes);
/* sra only: reads call->input (this rank's own values) and what arrived; writes the reduced shard's
 * message for all. arrived_bytes must be those of the plan, message_bytes at least. */
CGX_API cgx_status_t cgx_carried_reduce(const cgx_carried_t* carried, const void* arrived,
                                        int64_t arrived_bytes, void* message,
                                        int64_t message_bytes);
/* Writes call->output. `bytes`: of all messages, `size` times a stride. */
CGX_API cgx_status_t cgx_carried_decode(const cgx_carried_t* carried, const void* gathered,
                                        int64_t bytes);
/* What callers have carried in this process, over all groups of ranks. */
CGX_API cgx_status_t cgx_carried_traffic(cgx_traffic_t* traffic);

/* ---- 6. arithmetic on one rank -------------------------------------------------------------- */

/* sum[i] = values[0][i] + values[1][i] + ..., in fp32, in this order; num_values >= 1. */
CGX_API cgx_status_t cgx_sum(int32_t dtype, const void* const* values, int32_t num_values,
                             int64_t numel, float* sum);
/* `from` and `to` do not overlap, or are equal and so are the types. Values are rounded to the
 * nearest, ties to even. */
CGX_API cgx_status_t cgx_convert(int32_t from_dtype, const void* from, int32_t to_dtype, void* to,
                                 int64_t numel);
/* The same of a residual, which stays finite: what is not becomes 0, what is too large for the
 * dtype the largest. */
CGX_API cgx_status_t cgx_convert_residual(const float* from, int32_t to_dtype, void* to,
                                          int64_t numel);

typedef struct cgx_codec_t {
  size_t struct_size;
  cgx_config_t config; /* algorithm, gather_bits, intra_bits and minimal_size do not count */
  int64_t seed; /* the Philox counter is (first_index + i, rank, phase), the key is seed, as is */
  int64_t first_index; /* index of the first element in its segment: a multiple of bucket_size */
  int32_t dtype;
  int32_t rank;
  int32_t phase;
  int32_t device; /* a cgx_device_t: where values and bytes are */
  void* stream;   /* CGX_CUDA: the work is put on it, and nothing waits */
} cgx_codec_t;

/* Of `numel` values, at most: of codecs whose length is known beforehand, exactly. */
CGX_API cgx_status_t cgx_encoded_bytes(const cgx_codec_t* codec, int64_t numel, int64_t* bytes);
/* *written bytes; NULL: not told. */
CGX_API cgx_status_t cgx_quantize(const cgx_codec_t* codec, const void* values, int64_t numel,
                                  void* bytes, int64_t* written);
CGX_API cgx_status_t cgx_dequantize(const cgx_codec_t* codec, const void* bytes, int64_t num_bytes,
                                    int64_t numel, void* values);
/* The number from which what quantizing the values once must lose follows, for all bits: the sum
 * over buckets of n values of n * (max - min)^2 / 12 (compressor uniform), or the sum of squares
 * (levels); others are CGX_UNSUPPORTED, and so is a rotation. A last bucket that travels exact does
 * not count. NaN if a value is not finite. On the CPU only. */
CGX_API cgx_status_t cgx_statistic(const cgx_codec_t* codec, const void* values, int64_t numel,
                                   double* statistic);
/* What the owner of a shard does: decodes num_messages messages of numel values, `stride` bytes
 * apart, adds them up in fp32, in their order, and encodes the sum. */
CGX_API cgx_status_t cgx_sum_encoded(const cgx_codec_t* codec, const void* messages,
                                     int32_t num_messages, int64_t stride, int64_t numel,
                                     void* message);

#ifdef __cplusplus
} /* extern "C" */

#include "cgx/face.h"
#endif /* __cplusplus */
#endif /* CGX_CGX_H_ */
