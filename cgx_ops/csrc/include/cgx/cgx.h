/* The C API of libcgx. The bindings (torch_ops/, xla_ffi/, cgx_ops/_core/) use nothing else.
 *
 *   1. status codes and error texts: status.h
 *   2. the process: init, finalize, describe
 *   3. communicators
 *   4. collectives; dtypes and configs are in config.h
 *   5. an allreduce whose messages the caller sends (torch's or XLA's own collectives)
 *   6. arithmetic on one rank: exact sums; encoding and decoding, for tests and tools
 *
 * C++ callers also get cpp.h: exceptions and helpers.
 *
 * Errors: functions return a cgx_status_t and never throw. cgx_last_error() has the text of the
 * calling thread's last failure. Output arguments are unspecified after a failure, unless stated
 * otherwise. Any function may also return CGX_SYSTEM (out of memory) and CGX_INTERNAL.
 *
 * Threads: all functions may be called from any thread at any time, unless stated otherwise. A
 * request belongs to its caller: no two threads may call cgx_wait on it.
 *
 * Fork: a forked child cannot use its parent's communicators or GPUs. Its calls return CGX_CLOSED,
 * except cgx_finish and cgx_finalize, which do nothing. The functions of config.h work, and so do
 * the steps of section 5, and section 6 on the CPU.
 *
 * Versions: structs begin with struct_size = sizeof(struct). The library compares it, and returns
 * CGX_INVALID_ARGUMENT to callers that were built with other headers, except from cgx_comm_info,
 * which fills as much as the caller's struct holds. cgx_config_t and cgx_segment_t have no
 * struct_size: they are members of such structs. */
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

/** Describe this build as JSON, without starting anything.
 *
 * The object has "version", "cpu_target", "cpu_targets" (a list), "transports", "wires",
 * "compressors", "algorithms" (lists of {"name", "description"}) and "cuda": {"built", "driver",
 * "devices": [{"name", "capability", "memory_gib"}]}.
 *
 * @param[out] text The JSON, valid until this thread's next call of this function.
 * @return CGX_OK. */
CGX_API cgx_status_t cgx_describe(const char** text);

/** Describe the MPI library as JSON: {"library", "cuda_aware"}.
 *
 * Loads the library, but does not initialize MPI.
 *
 * @param[out] text The JSON, valid until this thread's next call of this function. "library" is the
 *     library's version line.
 * @return CGX_OK, or CGX_SYSTEM if the library cannot be loaded. */
CGX_API cgx_status_t cgx_describe_mpi(const char** text);

/** Set the path of the MPI library (libmpi.so.40).
 *
 * The library is loaded by the first cgx_init or cgx_describe_mpi that needs it. Without this call
 * the dynamic linker searches for it.
 *
 * @param path The path of the shared library; it is copied.
 * @return CGX_OK, or CGX_INVALID_ARGUMENT for a null pointer. */
CGX_API cgx_status_t cgx_set_mpi_path(const char* path);

/** Create the communicator "world", and initialize MPI if mpirun launched this process.
 *
 * MPI is also used if it has been initialized already. Without mpirun, the world has one rank and
 * does not need MPI. Further calls return the existing world. Collective over the ranks of the job.
 *
 * @param[out] world The communicator's id, 0. May be NULL.
 * @return CGX_OK; CGX_INVALID_ARGUMENT for an invalid CGX_* variable; CGX_MISMATCH if ranks have
 *     different versions or transports; CGX_UNSUPPORTED if no transport connects the ranks;
 *     CGX_SYSTEM if MPI cannot be loaded or fails; CGX_TIMEOUT. */
CGX_API cgx_status_t cgx_init(int32_t* world);

/** Wait until all CPU collectives of this process have ended, successfully or not.
 *
 * Call it before cgx_finalize, so that peers receive the results of collectives that this process
 * has started. Does not wait for announcements. The collectives' deadlines bound the wait.
 *
 * @return CGX_OK. */
CGX_API cgx_status_t cgx_finish(void);

/** Close all communicators, and finalize MPI if cgx_init initialized it.
 *
 * Idempotent and bounded in time. Call it at exit, for instance from Python's atexit.
 *
 * @return CGX_OK. */
CGX_API cgx_status_t cgx_finalize(void);

/* ---- 3. communicators --------------------------------------------------------------------- */

/** An all-gather that the caller provides, to create a communicator.
 *
 * @param context cgx_bootstrap_t.context.
 * @param mine This rank's data.
 * @param bytes Its size in bytes, which is equal on all ranks.
 * @param[out] all The data of all ranks, in rank order: size * bytes bytes.
 * @return 0 on success. */
typedef int (*cgx_allgather_t)(void* context, const void* mine, size_t bytes, void* all);

/** Arguments of cgx_comm_create. */
typedef struct cgx_bootstrap_t {
  size_t struct_size;
  int32_t rank;              /**< This rank, 0 to size - 1. */
  int32_t size;              /**< Number of ranks. */
  cgx_allgather_t allgather; /**< Exchanges data among the ranks. Called several times. */
  void* context;             /**< Passed to allgather. Not used after cgx_comm_create returns. */
  const char* name; /**< Unique among the open communicators of this process; at most 512 bytes.
                         cgx_init returns the one named "world". */
  const char* transport; /**< "AUTO", "SHM", "MPI", "TCP" or "NCCL" (NCCL between GPUs, otherwise as
                              AUTO); NULL: COMMUNICATOR_TYPE, or AUTO if that is unset. */
  double timeout_s;      /**< Default deadline of collectives, in seconds; <= 0: CGX_TIMEOUT, or 300
                              if that is unset. */
  const int32_t*
      noise_rank;  /**< The rank that rounding noise is derived from, >= 0; NULL: `rank`.
                        Pass the rank in the whole job, so that groups with equal seeds
                        draw different noise. Kept by cgx_comm_split and cgx_comm_group. */
  int32_t elastic; /**< 1: use only transports that connect the survivors of a lost process: not
                        MPI. Equal on all ranks. Kept by cgx_comm_split and cgx_comm_group. */
  double connect_timeout_s; /**< Longest time to connect the ranks; <= 0: timeout_s. */
} cgx_bootstrap_t;

/** State and statistics of a communicator on this rank.
 *
 * Times are sums over collectives that may overlap, so they can exceed the elapsed time. A
 * communicator of one rank sends nothing; its copies count as move_ns. Statistics do not include
 * collectives on GPUs. */
typedef struct cgx_comm_info_t {
  size_t struct_size;
  int32_t rank;          /**< This rank. */
  int32_t size;          /**< Number of ranks. */
  int32_t closed;        /**< 1 after a failure, cgx_comm_close or cgx_comm_abort. */
  const char* name;      /**< Valid until this thread's next cgx_comm_info. */
  const char* transport; /**< "self", or one of the "transports" of cgx_describe. Static. */
  int64_t bytes_sent;    /**< Bytes sent to peers since creation, headers included. */
  int64_t collectives;   /**< Collectives completed without error since creation. */
  int64_t bytes_in;      /**< Their uncompressed input, in bytes. */
  int64_t agree_ns;      /**< Their time from the start until all ranks' headers have arrived and
                              match, in nanoseconds. */
  int64_t move_ns;       /**< Their time from then until the end, without callbacks and waiters. */
  int64_t compute_ns;    /**< The part of both that was spent encoding, summing and decoding. */
  int64_t bytes_plain; /**< Bytes that an optimal uncompressed algorithm would send: bytes_in times
                            2(n-1)/n (allreduce), (n-1)/n (reduce_scatter) or n-1 (all_gather) for
                            n ranks; all_to_all: the blocks for other ranks. */
  const char* wire;    /**< The connection between the ranks' GPUs: "direct", "mpi", "staged" or
                            "nccl"; "" before the first cgx_enqueue. */
  int32_t host;        /**< Number of this rank's host. Hosts are numbered in the order of their
                            first ranks. */
  int32_t hosts;       /**< Number of hosts. */
  int64_t rejected_connections; /**< TCP connections that were rejected during setup: the peer did
                          not have the communicator's key, or claimed a rank that was connected. */
} cgx_comm_info_t;

/** Totals of this process since it started. Bytes are counted as in cgx_comm_info_t. */
typedef struct cgx_traffic_t {
  size_t struct_size;
  int64_t collectives; /**< Collectives completed without error. */
  int64_t bytes_in;    /**< Their uncompressed input. */
  int64_t bytes_plain; /**< Bytes that an optimal uncompressed algorithm would send. */
  int64_t bytes_sent;  /**< Bytes sent to peers. */
} cgx_traffic_t;

/** Create a communicator. Collective over the ranks of the bootstrap.
 *
 * @param bootstrap The ranks and how they exchange addresses. Not used after the call.
 * @param[out] comm The id of the communicator.
 * @return CGX_OK; CGX_INVALID_ARGUMENT; CGX_MISMATCH if ranks have different versions or
 *     transports; CGX_UNSUPPORTED if no transport connects the ranks; CGX_SYSTEM if allgather
 *     fails, or if another rank cannot take part. */
CGX_API cgx_status_t cgx_comm_create(const cgx_bootstrap_t* bootstrap, int32_t* comm);

/** Create a communicator of several ranks in this process, one for each of several threads.
 *
 * @param size Number of ranks.
 * @param name Name prefix: rank i's communicator is named "<name>/<i>".
 * @param timeout_s Default deadline in seconds; <= 0: as in cgx_bootstrap_t.
 * @param[out] comms An array of `size` ids; comms[i] belongs to rank i.
 * @return CGX_OK, or CGX_INVALID_ARGUMENT. */
CGX_API cgx_status_t cgx_comm_create_local(int32_t size, const char* name, double timeout_s,
                                           int32_t* comms);

/** Split a communicator by color, as MPI_Comm_split does. Collective over comm.
 *
 * Calls of different ranks are matched by name, so several splits may be started in any order.
 *
 * @param comm The parent.
 * @param color Ranks with equal color form a communicator. Negative: join none.
 * @param key New ranks are ordered by (key, rank in comm).
 * @param name The new communicator's name, equal on all ranks of comm. If ranks are threads, the
 *     name is "<name>/<rank in comm>".
 * @param[out] out The id of the new communicator, or -1 for a negative color.
 * @return As cgx_comm_create; CGX_NOT_FOUND or CGX_CLOSED for the parent; CGX_TIMEOUT or
 *     CGX_PEER_FAILED if a rank does not call. */
CGX_API cgx_status_t cgx_comm_split(int32_t comm, int32_t color, int32_t key, const char* name,
                                    int32_t* out);

/** Create a communicator from some ranks of another. Collective over the listed ranks only.
 *
 * @param comm The parent.
 * @param ranks Ranks of the parent, each once, including this one. ranks[i] becomes rank i.
 * @param num_ranks Number of entries in ranks.
 * @param name The new communicator's name, as in cgx_comm_split.
 * @param[out] out The id of the new communicator.
 * @return As cgx_comm_split. */
CGX_API cgx_status_t cgx_comm_group(int32_t comm, const int32_t* ranks, int32_t num_ranks,
                                    const char* name, int32_t* out);

/** Find an open communicator of this process by name.
 *
 * @param name The communicator's name.
 * @param[out] comm Its id.
 * @return CGX_OK, or CGX_NOT_FOUND. */
CGX_API cgx_status_t cgx_comm_find(const char* name, int32_t* comm);

/** Iterate over the open communicators of this process.
 *
 * @param after The previous id, or -1 to begin.
 * @param[out] comm The smallest id greater than `after`, or -1 if there is none.
 * @return CGX_OK. */
CGX_API cgx_status_t cgx_comm_next(int32_t after, int32_t* comm);

/** Report the state and statistics of a communicator.
 *
 * @param comm The communicator.
 * @param[in,out] info Set struct_size before the call. Callers built with older headers get the
 *     fields that they have.
 * @return CGX_OK, CGX_INVALID_ARGUMENT, CGX_NOT_FOUND, or CGX_CLOSED. */
CGX_API cgx_status_t cgx_comm_info(int32_t comm, cgx_comm_info_t* info);

/** Report the traffic of this process: all communicators, open or closed, and section 5.
 *
 * @param[in,out] traffic Set struct_size before the call.
 * @return CGX_OK, or CGX_INVALID_ARGUMENT. */
CGX_API cgx_status_t cgx_traffic(cgx_traffic_t* traffic);

/** Check whether ranks have been lost.
 *
 * Bindings call it when another library reports an error among the same ranks.
 *
 * @param comm The communicator.
 * @param seconds How long to wait for evidence, 0 to 1e8.
 * @return CGX_OK if no loss was detected; CGX_PEER_FAILED if ranks, or the communicator, are lost.
 *     cgx_last_error() names them. */
CGX_API cgx_status_t cgx_comm_find_lost(int32_t comm, double seconds);

/** Close a communicator on this rank and free it. Not collective.
 *
 * Waits, at most for the communicator's timeout, until peers have received all data sent to them.
 * The id becomes invalid: later calls return CGX_CLOSED. Collectives in flight end with CGX_CLOSED.
 *
 * @param comm The communicator.
 * @return CGX_OK, CGX_NOT_FOUND, or CGX_CLOSED if it was closed before. */
CGX_API cgx_status_t cgx_comm_close(int32_t comm);

/** Close a communicator on this rank, and end its collectives on all ranks. Not collective.
 *
 * Like cgx_comm_close, but it does not wait for peers: they have a moment, at most 1.5 seconds, to
 * receive what was sent to them. Their collectives in flight end with CGX_PEER_FAILED and the
 * reason. It first waits for this rank's collectives on GPUs, which end at the latest at their
 * deadlines.
 *
 * @param comm The communicator.
 * @param reason What errors say, such as "it is rebuilt without rank 2".
 * @return CGX_OK, CGX_NOT_FOUND, or CGX_CLOSED if it was closed before. */
CGX_API cgx_status_t cgx_comm_abort(int32_t comm, const char* reason);

/* ---- 4. collectives ----------------------------------------------------------------------- */

/** The collectives. cgx_verbs() describes them. */
typedef enum cgx_verb_t {
  CGX_ALLREDUCE = 0,
  CGX_REDUCE_SCATTER = 1,
  CGX_ALL_GATHER = 2,
  CGX_ALL_TO_ALL = 3
} cgx_verb_t;

/** Return the collectives, in the order of cgx_verb_t, as a JSON list.
 *
 * Each row has "id", "name", "blocks_in" and "blocks_out" (whether input or output hold one block
 * per rank), "shards" (whether both hold a single block), "reduces" (whether op is used),
 * "scatters" and "gathers" (its stages), "lists" (whether it accepts inputs and outputs),
 * "residuals" (whether it accepts residuals) and "algorithms" (a list of those that run it).
 *
 * @return A static string. */
CGX_API const char* cgx_verbs(void);

/** Where buffers are. */
typedef enum cgx_device_t { CGX_CPU = 0, CGX_CUDA = 1 } cgx_device_t;

/** A contiguous range of elements with its own compression, such as one tensor of a list.
 *
 * Buckets, minimal_size and the index of the noise begin again at each segment. Segments must not
 * overlap. */
typedef struct cgx_segment_t {
  int64_t offset;      /**< In elements, from the start of the buffer (or of a rank's block). */
  int64_t numel;       /**< Number of elements, >= 0. */
  int64_t bucket_size; /**< Replaces config.bucket_size. */
  int32_t bits;        /**< Replaces config.bits. */
  int32_t example;     /**< The number of the example of JAX's vmap, >= 0. CGX_AUTO measures only
                            example 0, and small segments share messages only within an example, so
                            that each example is reduced as if it were alone. */
  const cgx_config_t* config; /**< This segment's config, except for the algorithm; NULL: the
                                   call's. */
} cgx_segment_t;

/** Arguments of a collective.
 *
 * Ranks must pass equal values, except for addresses, offsets, splits, peer, comm, timeout_s,
 * noise_rank, and a seed of type CGX_SEED_OF_NOISE. If they differ, all ranks get CGX_MISMATCH.
 * Zero-initialize the struct, then set struct_size and occurrence = -1. */
typedef struct cgx_collective_t {
  size_t struct_size;
  int32_t comm;        /**< The communicator. */
  int32_t verb;        /**< A cgx_verb_t. */
  int32_t dtype;       /**< A cgx_dtype_t. */
  int32_t op;          /**< A cgx_op_t; all_gather and all_to_all ignore it. CGX_SUM or CGX_AVG if
                            bits < 32. */
  cgx_config_t config; /**< Compression of segments without a config of their own. */
  int64_t seed;        /**< Seed of stochastic and shift rounding, and of CGX_RANDK's indices (see
                            cgx_config_seed_use). Each segment and block derives its own. */
  const void* input;   /**< One block of block_numel elements or, for reduce_scatter and all_to_all,
                            one per rank. */
  void* output; /**< One block or, for all_gather and all_to_all, one per rank. allreduce: may
                     equal input. */
  int64_t block_numel;           /**< Elements of a block; 0: where the last segment ends. */
  const cgx_segment_t* segments; /**< Segments of each block. */
  int64_t num_segments;          /**< Number of segments; may be 0. */
  const char* name;   /**< Matches this call with those of other ranks, which may start named
                           collectives in any order. NULL or "": calls match in program order. */
  int64_t occurrence; /**< How often the name has been used before; < 0: the communicator counts. */
  double timeout_s;   /**< Deadline in seconds; <= 0: the communicator's. */
  const void* const* inputs; /**< allreduce: addresses of the segments' values, instead of input and
                                  the segments' offsets. NULL: use input. */
  void* const* outputs;      /**< The same for the results. NULL: use output. */
  const int64_t* seeds;      /**< One seed per segment, used as given; NULL: derived from seed. */
  /** Error feedback, for sums and averages of allreduce and reduce_scatter: one address per
   * segment, each may be NULL; or NULL for none. Of small segments without fixed length, those with
   * residuals must be the same on all ranks, unless all or none have one.
   *
   * A residual has the dtype of the values and is updated in place. It is added to this rank's
   * values in fp32. Then it becomes the quantization error of this rank: that of encoding its
   * values, plus, for elements that this rank reduces, that of encoding their sum (in units of the
   * sum, even for CGX_AVG). Up to rounding in fp32 and to the dtype, summed over all ranks: inputs
   * plus old residuals equal the sum plus new residuals. Errors that are not finite become 0. After
   * a failure residuals are unspecified.
   *
   * reduce_scatter: the address is that of the first block's residual; those of the other blocks
   * follow at a distance of block_numel elements. */
  void* const* residuals;
  int64_t divisor; /**< Divisor of CGX_AVG; 0: the number of ranks. */
  int32_t device;  /**< A cgx_device_t: where all buffers are. */
  int32_t launch;  /**< Number of the program launch that makes this call, if a runtime numbers
                        launches equally on all ranks; 0: none. Ranks whose launches differ get
                        CGX_MISMATCH. This detects a rank that skipped calls because its launch
                        failed. */
  void* stream;    /**< CGX_CUDA: the cudaStream_t to enqueue on; NULL: the default stream. */
  const int64_t* device_seeds; /**< CGX_CUDA: one seed per segment, in GPU memory, instead of seeds.
                                */
  const int64_t* device_seed;  /**< CGX_CUDA: one seed, in GPU memory, instead of seed. */
  const int32_t* noise_rank;   /**< As in cgx_bootstrap_t; NULL: the communicator's. */
  /** all_to_all: elements of the block for each rank, one entry per rank. The blocks are contiguous
   * in `input`, in rank order. NULL: all blocks have block_numel elements.
   *
   * input_splits[r] on rank s must equal output_splits[s] on rank r, otherwise all ranks get
   * CGX_MISMATCH. Pass both lists or neither. With them, pass one segment of 0 elements: it fills
   * every block, and its buckets begin again in each block. block_numel is then the size of a row,
   * which ranks compare and which divides all splits; 0: blocks have no rows. */
  const int64_t* input_splits;
  const int64_t* output_splits; /**< The same for the blocks from each rank, in `output`. */
  /** all_to_all with splits, on the CPU: the only other rank that takes part, so that this is a
   * send, a receive or both. All other splits must be 0. NULL: all ranks take part.
   *
   * The peer passes this rank, and the call's name must belong to this pair. A call that moves no
   * elements is an announcement: it only compares the arguments, and cgx_comm_info does not count
   * it. If the peer is lost or leaves, it ends alone with CGX_PEER_FAILED. If this rank closes the
   * communicator, it ends here with CGX_CLOSED, and the peer's announcement may still succeed. */
  const int32_t* peer;
} cgx_collective_t;

/** A started collective. */
typedef struct cgx_request_t cgx_request_t;

/** Reports the end of a collective. Called once.
 *
 * It runs on the progress thread, on a waiting thread, or in the function that it was passed to,
 * so it must not block.
 *
 * @param context As passed with the callback.
 * @param status How the collective ended.
 * @param message The error text, or "" on success. Valid during the call. */
typedef void (*cgx_callback_t)(void* context, cgx_status_t status, const char* message);

/** Start a collective on CPU buffers. Never blocks on a peer.
 *
 * Buffers must stay valid until the collective ends; structs and arrays of pointers may be freed
 * when this returns. After a failure nothing has been started, and the callback will not be called.
 *
 * @param collective The arguments.
 * @param callback Called at the end; NULL if request is given.
 * @param context Passed to callback.
 * @param[out] request The request, to be freed by cgx_wait; NULL if callback is given.
 * @return CGX_OK; CGX_INVALID_ARGUMENT, CGX_UNSUPPORTED, CGX_NOT_FOUND or CGX_CLOSED. */
CGX_API cgx_status_t cgx_start(const cgx_collective_t* collective, cgx_callback_t callback,
                               void* context, cgx_request_t** request);

/** Test whether a collective has ended. Does not free the request.
 *
 * @param request The request.
 * @param[out] done 1 if it has ended, else 0.
 * @return CGX_OK, also if the collective failed. */
CGX_API cgx_status_t cgx_test(cgx_request_t* request, int32_t* done);

/** Register a callback for the end of a collective. It is called immediately if that has ended.
 *
 * The request must still be freed by cgx_wait, which returns after the callback has. Call cgx_wait
 * only after this function has returned, or on another thread that the callback triggers.
 *
 * @param request A request without a callback.
 * @param callback Called once.
 * @param context Passed to callback.
 * @return CGX_OK; CGX_INVALID_ARGUMENT if the request has a callback already. */
CGX_API cgx_status_t cgx_notify(cgx_request_t* request, cgx_callback_t callback, void* context);

/** Block until a collective ends, and free the request. The collective's deadline bounds the wait.
 *
 * @param request The request, which becomes invalid.
 * @return How the collective ended: CGX_OK, CGX_MISMATCH, CGX_TIMEOUT, CGX_PEER_FAILED, CGX_CLOSED,
 *     CGX_SYSTEM, or the status of a cgx_refuse. */
CGX_API cgx_status_t cgx_wait(cgx_request_t* request);

/** Start a collective on CPU buffers and block until it ends.
 *
 * Equivalent to cgx_start and cgx_wait, but does not wake the progress thread.
 *
 * @param collective The arguments.
 * @return As cgx_start and cgx_wait. */
CGX_API cgx_status_t cgx_run(const cgx_collective_t* collective);

/** Block until a collective ends or a time has passed. Does not free the request.
 *
 * For callers that must check for signals regularly, such as Python. Any number of threads may
 * call it, also after the end.
 *
 * @param request The request.
 * @param seconds The longest time to block, 0 to 1e8.
 * @param[out] done 1 if the collective has ended, else 0.
 * @return CGX_OK while it runs; then as cgx_wait, in every call. */
CGX_API cgx_status_t cgx_wait_for(cgx_request_t* request, double seconds, int32_t* done);

/** Start a collective on CPU buffers and block until it ends or a time has passed.
 *
 * @param collective The arguments.
 * @param seconds The longest time to block, 0 to 1e8.
 * @param[out] request NULL if the collective has ended or could not be started; otherwise the
 *     request, to be freed by cgx_wait.
 * @return As cgx_run; CGX_OK if the collective still runs. */
CGX_API cgx_status_t cgx_run_for(const cgx_collective_t* collective, double seconds,
                                 cgx_request_t** request);

/** Enqueue a collective on GPU buffers (device = CGX_CUDA) on collective->stream.
 *
 * Returns without waiting for the GPU or for peers, with three exceptions. A communicator's first
 * call connects the ranks' GPUs. With the wires "nccl" and "mpi" every call waits on the host until
 * all ranks have made it, and with "mpi" also for the stream and for the messages. A call with
 * splits waits for all ranks, too, since they compare the sizes. Each wait is bounded by the
 * timeout. Results are visible to later work on the stream, and inputs must stay valid until then,
 * as with any kernel.
 *
 * The GPU collectives of a communicator run one after another, in the order of the calls. The order
 * must be equal on all ranks, otherwise they fail with CGX_MISMATCH, or with CGX_TIMEOUT if one of
 * them has splits. All buffers of a rank must be
 * on one GPU, in all calls on the communicator.
 *
 * CUDA graphs: with the wire "direct" the stream may be capturing, unless there are splits. The
 * caller must order replays with the communicator's other collectives, equally on all ranks, and
 * must let them end before the communicator is closed.
 *
 * Late failures (a deadline, a lost peer, a mismatch) write NaN to all results that are not
 * complete, and close the communicator for GPUs. The next cgx_enqueue and cgx_comm_check return the
 * failure.
 *
 * @param collective The arguments.
 * @return CGX_OK if enqueued; as cgx_start; or the status of an earlier late failure. */
CGX_API cgx_status_t cgx_enqueue(const cgx_collective_t* collective);

/** Report late failures of a communicator's GPU collectives.
 *
 * @param comm The communicator.
 * @param finish Not 0: wait for all enqueued collectives first.
 * @return CGX_OK if no failure is known yet; else CGX_TIMEOUT, CGX_PEER_FAILED, CGX_MISMATCH or
 *     CGX_SYSTEM, also after the communicator was closed; CGX_CLOSED if it was closed without a
 *     failure. */
CGX_API cgx_status_t cgx_comm_check(int32_t comm, int32_t finish);

/** Report whether a stream of the thread's current GPU is capturing a CUDA graph.
 *
 * @param stream A cudaStream_t.
 * @param[out] recording 1 if it is, else 0.
 * @return CGX_OK; CGX_UNSUPPORTED without CUDA; CGX_SYSTEM if CUDA fails. */
CGX_API cgx_status_t cgx_stream_recording(void* stream, int32_t* recording);

/** Announce that this rank will not take part in a collective, so that peers do not wait for it.
 *
 * The collective ends on all peers with `status` and a text that contains `message`, once every
 * rank has started or refused it. The call counts as a use of the name. Never blocks; the
 * communicator stays open.
 *
 * On GPUs (device = CGX_CUDA) ranks can refuse only calls with splits: set input_splits, whose
 * numbers are not read. It blocks until all ranks have made the call, at most for the timeout, and
 * peers get CGX_PEER_FAILED. Without splits it does nothing, and peers reach their deadlines.
 *
 * @param collective Identifies the collective by comm, device, name and occurrence. Other fields
 *     are ignored.
 * @param status Not CGX_OK.
 * @param message The reason, at most 512 bytes; longer texts are truncated.
 * @return CGX_OK, CGX_INVALID_ARGUMENT, CGX_NOT_FOUND, or CGX_CLOSED. */
CGX_API cgx_status_t cgx_refuse(const cgx_collective_t* collective, cgx_status_t status,
                                const char* message);

/** The algorithm and traffic of a collective. */
typedef struct cgx_plan_t {
  size_t struct_size;
  int32_t algorithm; /**< A cgx_algorithm_t, with CGX_AUTO resolved. */
  int32_t reserved;
  int64_t payload_bytes; /**< Encoded bytes that this rank sends to all peers together; the bound if
                              the size depends on the values (CGX_ENTROPY, CGX_LOSSLESS). */
  int64_t exact_bytes;   /**< The same without compression. */
} cgx_plan_t;

/** Plan a collective without starting it.
 *
 * @param collective The arguments, as for cgx_start.
 * @param[in,out] plan Set struct_size before the call.
 * @return As cgx_start. */
CGX_API cgx_status_t cgx_plan(const cgx_collective_t* collective, cgx_plan_t* plan);

/* ---- 5. an allreduce whose messages the caller sends ---------------------------------------- */

/** Arguments of the steps of an allreduce whose messages the caller sends.
 *
 * Results and payloads are bit-identical to those of cgx_run. The steps need no communicator and
 * no cgx_init:
 *
 *   - CGX_SRA: cgx_carried_encode; all-to-all (rank p receives scatter_bytes[p] from every other
 *     rank, and nothing from itself); cgx_carried_reduce; all-gather (gather_bytes[p] from rank p);
 *     cgx_carried_decode.
 *   - CGX_ONE_SHOT: cgx_carried_encode; all-gather (gather_bytes, equal for all ranks);
 *     cgx_carried_decode, which sums.
 *   - One rank alone: cgx_carried_decode, which copies input to output.
 *
 * Messages are contiguous in rank order. In the input of cgx_carried_decode they are at equal
 * distances, at least as long as the longest message.
 *
 * GPUs (the call's device is CGX_CUDA): the steps enqueue kernels on the call's stream and return,
 * also while the stream is capturing. The caller enqueues the exchanges on the same stream. All
 * buffers are on one GPU. Messages are equal to those of CPU calls, so ranks may use different
 * devices. The buffers of the all-to-all also have room for a message of this rank to itself,
 * scatter_bytes[rank] bytes, which cgx_carried_encode zeroes and cgx_carried_reduce does not read.
 * CGX_RANDK is not supported.
 *
 * The library cannot check that all ranks make the same call, as messages have no headers. It only
 * compares the seeds of CGX_RANDK, of which messages carry a hash: if they differ,
 * cgx_carried_reduce (or cgx_carried_decode, with CGX_ONE_SHOT) returns CGX_MISMATCH on all ranks.
 */
typedef struct cgx_carried_t {
  size_t struct_size;
  int32_t rank;                 /**< This rank. */
  int32_t size;                 /**< Number of ranks. */
  const cgx_collective_t* call; /**< The allreduce. comm and name are ignored; the algorithm must be
                                     CGX_AUTO, CGX_ONE_SHOT or CGX_SRA; a NULL noise_rank means
                                     `rank`. */
  int32_t devices; /**< Devices of this rank that take the same steps, each of which sends an equal
                        part of the messages. Statistics count a part per call. 0 means 1. */
} cgx_carried_t;

/** Report the algorithm and the sizes of the messages.
 *
 * @param carried The arguments. Buffers of the call may be NULL.
 * @param[out] algorithm CGX_ONE_SHOT or CGX_SRA.
 * @param[out] scatter_bytes An array of `size` sizes, in bytes: the message to each rank. All are 0
 *     for CGX_ONE_SHOT.
 * @param[out] gather_bytes An array of `size` sizes, in bytes: the message of each rank to all.
 * @return CGX_OK, CGX_INVALID_ARGUMENT, or CGX_UNSUPPORTED. */
CGX_API cgx_status_t cgx_carried_plan(const cgx_carried_t* carried, int32_t* algorithm,
                                      int64_t* scatter_bytes, int64_t* gather_bytes);

/** Encode this rank's values: the messages to the other ranks, or CGX_ONE_SHOT's message to all.
 *
 * @param carried The arguments. The call's output may be NULL.
 * @param[out] messages The messages, contiguous.
 * @param bytes Size of the buffer; at least that of the messages. Unused bytes become 0, and count
 *     as sent.
 * @return CGX_OK, CGX_INVALID_ARGUMENT, CGX_UNSUPPORTED, or CGX_SYSTEM if CUDA fails. */
CGX_API cgx_status_t cgx_carried_encode(const cgx_carried_t* carried, void* messages,
                                        int64_t bytes);

/** Reduce and encode this rank's shard. CGX_SRA only.
 *
 * @param carried The arguments. The call's input must be unchanged; its output may be NULL.
 * @param arrived The messages from the other ranks.
 * @param arrived_bytes Size of the buffer: the planned bytes of these messages (on GPUs, of all
 *     ranks).
 * @param[out] message The message to all ranks.
 * @param message_bytes Size of the buffer; at least that of the message. Unused bytes become 0, and
 *     count as sent.
 * @return CGX_OK, CGX_INVALID_ARGUMENT, CGX_UNSUPPORTED, CGX_MISMATCH, or CGX_SYSTEM if CUDA fails.
 */
CGX_API cgx_status_t cgx_carried_reduce(const cgx_carried_t* carried, const void* arrived,
                                        int64_t arrived_bytes, void* message,
                                        int64_t message_bytes);

/** Decode the messages of all ranks to the call's output.
 *
 * @param carried The arguments. The call's input may be NULL, except for one rank alone.
 * @param gathered The messages of all ranks, at equal distances.
 * @param bytes Their total size: `size` times the distance.
 * @return As cgx_carried_reduce. */
CGX_API cgx_status_t cgx_carried_decode(const cgx_carried_t* carried, const void* gathered,
                                        int64_t bytes);

/** Report the traffic of this section's allreduces in this process.
 *
 * @param[in,out] traffic Set struct_size before the call.
 * @return CGX_OK, or CGX_INVALID_ARGUMENT. */
CGX_API cgx_status_t cgx_carried_traffic(cgx_traffic_t* traffic);

/* ---- 6. arithmetic on one rank -------------------------------------------------------------- */

/** Add arrays in fp32: sum[i] = values[0][i] + values[1][i] + ..., in this order.
 *
 * @param dtype A cgx_dtype_t: the type of the values.
 * @param values num_values arrays of numel elements each.
 * @param num_values Number of arrays, >= 1.
 * @param numel Elements of each array.
 * @param[out] sum numel elements.
 * @return CGX_OK, or CGX_INVALID_ARGUMENT. */
CGX_API cgx_status_t cgx_sum(int32_t dtype, const void* const* values, int32_t num_values,
                             int64_t numel, float* sum);

/** Convert values to another dtype, rounding to nearest even.
 *
 * @param from_dtype A cgx_dtype_t.
 * @param from numel elements.
 * @param to_dtype A cgx_dtype_t.
 * @param[out] to numel elements. Must not overlap `from`; may equal it if the types are equal.
 * @param numel Number of elements.
 * @return CGX_OK, or CGX_INVALID_ARGUMENT. */
CGX_API cgx_status_t cgx_convert(int32_t from_dtype, const void* from, int32_t to_dtype, void* to,
                                 int64_t numel);

/** Convert a residual to another dtype. The result is finite.
 *
 * NaN and infinity become 0. Values out of the dtype's range become its largest value.
 *
 * @param from numel elements.
 * @param to_dtype A cgx_dtype_t.
 * @param[out] to numel elements.
 * @param numel Number of elements.
 * @return CGX_OK, or CGX_INVALID_ARGUMENT. */
CGX_API cgx_status_t cgx_convert_residual(const float* from, int32_t to_dtype, void* to,
                                          int64_t numel);

/** An encoder and decoder: a config, a dtype, and the position in the stream of noise. */
typedef struct cgx_codec_t {
  size_t struct_size;
  cgx_config_t config; /**< algorithm, gather_bits, intra_bits and minimal_size are ignored. */
  int64_t seed;        /**< The key of the noise's Philox generator, used as given. */
  int64_t first_index; /**< Index of the first element in its segment, where shards may begin.
                          The noise of element i has the counter (first_index + i, rank, phase). */
  int32_t dtype;       /**< A cgx_dtype_t. */
  int32_t rank;        /**< >= 0. */
  int32_t phase;       /**< >= 0: the stage, see docs/reference/wire_format.md, section 4. */
  int32_t device;      /**< A cgx_device_t: where values and bytes are. */
  void* stream; /**< CGX_CUDA: the cudaStream_t to enqueue on. Calls do not wait for the GPU. */
} cgx_codec_t;

/** Report how many bytes `numel` values take when encoded.
 *
 * @param codec The codec.
 * @param numel Number of values.
 * @param[out] bytes The size in bytes. If it depends on the values (CGX_ENTROPY, CGX_LOSSLESS), the
 *     largest possible size.
 * @return CGX_OK, or CGX_INVALID_ARGUMENT. */
CGX_API cgx_status_t cgx_encoded_bytes(const cgx_codec_t* codec, int64_t numel, int64_t* bytes);

/** Encode values.
 *
 * @param codec The codec.
 * @param values numel values.
 * @param numel Number of values.
 * @param[out] bytes The encoded values: a buffer of cgx_encoded_bytes bytes.
 * @param[out] written Bytes used. May be NULL.
 * @return CGX_OK; CGX_INVALID_ARGUMENT; CGX_UNSUPPORTED if GPUs do not support the config. */
CGX_API cgx_status_t cgx_quantize(const cgx_codec_t* codec, const void* values, int64_t numel,
                                  void* bytes, int64_t* written);

/** Decode values.
 *
 * @param codec The codec that encoded them.
 * @param bytes The encoded values.
 * @param num_bytes Their size, as cgx_quantize reported it.
 * @param numel Number of values.
 * @param[out] values numel values.
 * @return As cgx_quantize; CGX_INVALID_ARGUMENT also for malformed bytes. */
CGX_API cgx_status_t cgx_dequantize(const cgx_codec_t* codec, const void* bytes, int64_t num_bytes,
                                    int64_t numel, void* values);

/** Compute the statistic that predicts the quantization error of values, for all bits or rates.
 *
 * It is the sum over buckets of n * (max - min)^2 / 12 for n values (CGX_UNIFORM), or the sum of
 * squares (CGX_LEVELS, CGX_ENTROPY). A last bucket that is sent uncompressed is not included. CPU
 * only.
 *
 * @param codec The codec.
 * @param values numel values.
 * @param numel Number of values.
 * @param[out] statistic The statistic; NaN if a value is not finite.
 * @return CGX_OK; CGX_INVALID_ARGUMENT; CGX_UNSUPPORTED for other compressors, with a rotation, and
 *     on GPUs. */
CGX_API cgx_status_t cgx_statistic(const cgx_codec_t* codec, const void* values, int64_t numel,
                                   double* statistic);

/** Decode messages, add them in fp32 in their order, and encode the sum, as a shard's owner does.
 *
 * @param codec The codec.
 * @param messages num_messages encoded messages of numel values.
 * @param num_messages Number of messages, >= 1.
 * @param stride Bytes from one message to the next.
 * @param numel Number of values per message.
 * @param[out] message The encoded sum.
 * @return As cgx_quantize; CGX_UNSUPPORTED also if the size of messages depends on the values. */
CGX_API cgx_status_t cgx_sum_encoded(const cgx_codec_t* codec, const void* messages,
                                     int32_t num_messages, int64_t stride, int64_t numel,
                                     void* message);

#ifdef __cplusplus
} /* extern "C" */

#include "cgx/cpp.h"
#endif /* __cplusplus */
#endif /* CGX_CGX_H_ */
