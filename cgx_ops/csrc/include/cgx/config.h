/* Section 4 of the C API (cgx.h), first part: dtypes, ops, and the config of a collective. */
#ifndef CGX_CONFIG_H_
#define CGX_CONFIG_H_

#include <stdint.h>

#include "cgx/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Element types of the values that collectives send. */
typedef enum cgx_dtype_t { CGX_FLOAT32 = 0, CGX_FLOAT16 = 1, CGX_BFLOAT16 = 2 } cgx_dtype_t;

/** Reduction operators. Values that are not sent exactly support CGX_SUM and CGX_AVG only. */
typedef enum cgx_op_t {
  CGX_SUM = 0,
  CGX_AVG = 1,
  CGX_MIN = 2,
  CGX_MAX = 3,
  CGX_PRODUCT = 4
} cgx_op_t;

/** Algorithms. reduce_scatter and all_gather run as CGX_HIERARCHICAL or CGX_SRA, which also
 * replaces CGX_ONE_SHOT and CGX_RING. all_to_all has one algorithm. */
typedef enum cgx_algorithm_t {
  CGX_AUTO = 0,         /**< Choose by message size and hosts. */
  CGX_ONE_SHOT = 1,     /**< Every rank sends all its values to every other rank. */
  CGX_SRA = 2,          /**< Scatter-reduce-allgather: each rank reduces one shard. */
  CGX_RING = 3,         /**< Ring reduce-scatter, then all-gather. */
  CGX_HIERARCHICAL = 4, /**< Reduce within each host first. Runs as CGX_SRA if there is only one
                             host, or if no host has several ranks. */
  CGX_BY_HOSTS = 5      /**< The choice of CGX_AUTO for long messages, at any length. */
} cgx_algorithm_t;

/** How values are rounded to quantization levels. */
typedef enum cgx_rounding_t {
  CGX_NEAREST = 0,    /**< To the nearest level: the smallest error, but biased. */
  CGX_STOCHASTIC = 1, /**< Up or down at random: unbiased. */
  CGX_SHIFT = 2,      /**< To the nearest level of a grid that one random fraction of a step shifts
                           per bucket (QSDP): unbiased, with the error of CGX_NEAREST. */
  CGX_CODECS_OWN = 3  /**< The compressor's default: the first in "roundings" of
                           cgx_compressors(). */
} cgx_rounding_t;

/** Compressors. docs/reference/wire_format.md defines the bytes of CGX_UNIFORM,
 * compressor_formats.md in the same folder those of the others, and docs/explanation/numerics.md
 * their errors. */
typedef enum cgx_compressor_t {
  CGX_UNIFORM = 0,     /**< Evenly spaced levels between the minimum and maximum of a bucket. */
  CGX_LEVELS = 1,      /**< Fixed levels, scaled by the root mean square of a bucket. */
  CGX_SIGN = 2,        /**< Signs. The sum is a majority vote. */
  CGX_ONEBIT = 3,      /**< Signs, plus the means of the negative and of the other values. */
  CGX_TERNARY = 4,     /**< -1, 0 or 1, scaled by the largest magnitude of a bucket. */
  CGX_QSGD = 5,        /**< Signs and levels, scaled by the norm of a bucket. */
  CGX_HALF = 6,        /**< 16 bits: bf16 for float32 values. */
  CGX_TOPK = 7,        /**< The values of largest magnitude in a bucket. */
  CGX_RANDK = 8,       /**< Values at random indices, which are the same on all ranks. */
  CGX_ENTROPY = 9,     /**< Evenly spaced levels with codes of variable length. */
  CGX_LOSSLESS = 10,   /**< Uncompressed values whose exponents have codes of variable length. */
  CGX_MXFP8 = 11,      /**< OCP MXFP8 in e4m3: blocks of 32 values share a power of two. */
  CGX_MXFP8_E5M2 = 12, /**< OCP MXFP8 in e5m2. */
  CGX_MXFP4 = 13,      /**< OCP MXFP4. */
  CGX_NVFP4 = 14 /**< NVFP4: 4-bit floats; scales in e4m3 for 16 values, in fp32 for a bucket. */
} cgx_compressor_t;

/** Whether a training step uses error feedback. */
typedef enum cgx_feedback_t {
  CGX_FEEDBACK_IF_BIASED = 0, /**< Only if the compressor is biased. */
  CGX_FEEDBACK_OFF = 1,
  CGX_FEEDBACK_ON = 2
} cgx_feedback_t;

/** How values are compressed.
 *
 * cgx_config_fields() describes each field: accepted values, default, documentation. A collective
 * returns CGX_INVALID_ARGUMENT for any other value. Initialize a config by cgx_config_parse(""). */
typedef struct cgx_config_t {
  int64_t bits;        /**< Bits per element: 1 to 8, or 32 (uncompressed, with any compressor). */
  int64_t bucket_size; /**< Elements that share one header (scale). */
  int64_t rounding;    /**< A cgx_rounding_t. */
  int64_t algorithm;   /**< A cgx_algorithm_t. all_to_all ignores it. */
  int64_t
      gather_bits;    /**< Bits of the reduced values in the gather stage; 0: the same as `bits`. */
  int64_t intra_bits; /**< CGX_HIERARCHICAL: bits of values that are reduced within their host; 0:
                           uncompressed. Uncompressed segments stay uncompressed. */
  int64_t skip_incomplete_buckets; /**< 1: send the last bucket of a segment uncompressed if it is
                                        not full. */
  int64_t minimal_size; /**< Segments of fewer than max(CGX_SMALLEST_COMPRESSED, minimal_size)
                             elements are sent uncompressed. */
  int64_t compressor;   /**< A cgx_compressor_t. */
  int64_t density;      /**< Sparse compressors: the share of values to send, in billionths; 0: the
                             default, 1 %. */
  int64_t value_bits;   /**< CGX_TOPK: bits of each value sent: 1 to 8, 16 or 32; 0: 32. */
  int64_t rotation;     /**< Elements that a Hadamard matrix rotates together before encoding; 0:
                             none. */
  int64_t rate;         /**< CGX_ENTROPY: mean bits per value, headers included, in billionths; 0:
                             the default, 2. */
  int64_t clip;         /**< CGX_TERNARY: 1 clips values at 2.5 times the root mean square of their
                             bucket. */
  int64_t error_feedback; /**< A cgx_feedback_t. Used by training steps; collectives ignore it, and
                               it may differ between ranks. */
  int64_t residual_decay; /**< The fraction of a residual that a training step adds, in billionths;
                               0: all of it. Collectives ignore it, as error_feedback. */
} cgx_config_t;

/** The smallest number of elements worth compressing. Fewer are shorter uncompressed. */
#define CGX_SMALLEST_COMPRESSED 16

/** Return the fields of cgx_config_t, in their order, as a JSON list.
 *
 * Each row has "name", "default", "accepted" (a text for errors), "documentation" (one line),
 * "of_compressor" (true if the value is specific to a compressor, so that changing the compressor
 * resets it) and "words" ({name: number} of the values that have names).
 *
 * @return A static string. */
CGX_API const char* cgx_config_fields(void);

/** Return the name of a cgx_compressor_t, such as "topk".
 *
 * @return A static string; "unknown" if the number is not a compressor. */
CGX_API const char* cgx_compressor_name(int64_t compressor);

/** Return the compressors, in the order of cgx_compressor_t, as a JSON list.
 *
 * Each row has "name", "description", "fixed_length" (whether the encoded size depends on the
 * number of values only), "bits" ([lowest, highest]; [0, 0] if the width is fixed), "roundings"
 * (names, the default first), "knobs" (the optional config fields that it uses), "exact" (whether
 * values are sent exactly), "biased" (whether nearest rounding biases the result) and "device" (""
 * if GPUs support it, else the reason why not).
 *
 * @return A static string. */
CGX_API const char* cgx_compressors(void);

/** What a collective uses its seed for. */
typedef enum cgx_seed_use_t {
  CGX_SEED_UNUSED = 0,
  CGX_SEED_OF_NOISE = 1, /**< Rounding noise. Ranks may pass different seeds. */
  CGX_SEED_OF_PLACES = 2 /**< The random indices of CGX_RANDK. All ranks must pass the same seed. */
} cgx_seed_use_t;

/** Report what a collective with this config uses its seed for.
 *
 * @param config The config.
 * @param[out] use A cgx_seed_use_t.
 * @return CGX_OK, or CGX_INVALID_ARGUMENT for an invalid config. */
CGX_API cgx_status_t cgx_config_seed_use(const cgx_config_t* config, int32_t* use);

/** Return whether values are sent without an error: in 32 bits, or by an exact compressor.
 *
 * @param config The config.
 * @param[out] exact 1 or 0.
 * @return CGX_OK or CGX_INVALID_ARGUMENT. */
CGX_API cgx_status_t cgx_config_is_exact(const cgx_config_t* config, int32_t* exact);

/** Check that error feedback converges with this config.
 *
 * @param config The config.
 * @return CGX_OK; CGX_INVALID_ARGUMENT if the config is invalid or error feedback does not converge
 *     with it. cgx_last_error() has the reason. */
CGX_API cgx_status_t cgx_config_check_feedback(const cgx_config_t* config);

/** Parse a config such as "bits=4 rounding='nearest' gather_bits=None".
 *
 * Fields are separated by one space. Values are written as Python literals.
 *
 * @param text The fields to set; all others get their defaults. NULL is the same as "".
 * @param[out] config The config. Unchanged after a failure.
 * @return CGX_OK, or CGX_INVALID_ARGUMENT. */
CGX_API cgx_status_t cgx_config_parse(const char* text, cgx_config_t* config);

/** Override fields of a config.
 *
 * If the text changes the compressor, all compressor-specific fields that it does not set return
 * to their defaults, except that bits = 32 is kept. If the text sets bits = 32, error_feedback
 * becomes CGX_FEEDBACK_IF_BIASED.
 *
 * @param text The fields to set, in the format of cgx_config_parse().
 * @param[in,out] config The config. Unchanged after a failure.
 * @return CGX_OK, or CGX_INVALID_ARGUMENT. */
CGX_API cgx_status_t cgx_config_override(const char* text, cgx_config_t* config);

/** Format all fields of a config as a text that cgx_config_parse() reads.
 *
 * @param config The config.
 * @param[out] text The text, valid until this thread's next call of this function.
 * @return CGX_OK, or CGX_INVALID_ARGUMENT for an invalid config. */
CGX_API cgx_status_t cgx_config_text(const cgx_config_t* config, const char** text);

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* CGX_CONFIG_H_ */
