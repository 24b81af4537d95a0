/* cgx.h, section 4: what values are, and how they travel: the config of a collective. */
#ifndef CGX_CONFIG_H_
#define CGX_CONFIG_H_

#include <stdint.h>

#include "cgx/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cgx_dtype_t { CGX_FLOAT32 = 0, CGX_FLOAT16 = 1, CGX_BFLOAT16 = 2 } cgx_dtype_t;
typedef enum cgx_op_t {
  CGX_SUM = 0,
  CGX_AVG = 1,
  CGX_MIN = 2,
  CGX_MAX = 3,
  CGX_PRODUCT = 4
} cgx_op_t;
typedef enum cgx_algorithm_t {
  CGX_AUTO = 0,
  CGX_ONE_SHOT = 1,
  CGX_SRA = 2,
  CGX_RING = 3,
  CGX_HIERARCHICAL = 4, /* where no host has several ranks, or there is one only: CGX_SRA */
  CGX_BY_HOSTS = 5      /* what CGX_AUTO takes for long messages, whatever the length of this one */
} cgx_algorithm_t;
/* CGX_SHIFT: every bucket's grid is shifted by one random fraction of a step, then values round to
 * the nearest (QSDP). Unbiased as stochastic rounding, at the error of nearest. */
typedef enum cgx_rounding_t {
  CGX_NEAREST = 0,
  CGX_STOCHASTIC = 1,
  CGX_SHIFT = 2,
  CGX_CODECS_OWN = 3 /* the one that the compressor names first */
} cgx_rounding_t;

/* docs/reference/wire_format.md has the bytes of each, docs/explanation/numerics.md its error. */
typedef enum cgx_compressor_t {
  CGX_UNIFORM = 0,   /* levels between a bucket's minimum and maximum */
  CGX_LEVELS = 1,    /* fixed levels times a bucket's root mean square */
  CGX_SIGN = 2,      /* signs; the sum is a majority vote */
  CGX_ONEBIT = 3,    /* signs; means of the negative and of the other values */
  CGX_TERNARY = 4,   /* -1, 0 or 1 times a bucket's largest magnitude */
  CGX_QSGD = 5,      /* signs and levels of a bucket's norm */
  CGX_HALF = 6,      /* 16 bits: bf16 of float32 */
  CGX_TOPK = 7,      /* a bucket's largest magnitudes */
  CGX_THRESHOLD = 8, /* what is above a threshold that a sample tells */
  CGX_RANDK = 9      /* values at places that all ranks draw alike */
} cgx_compressor_t;

typedef enum cgx_feedback_t {
  CGX_FEEDBACK_IF_BIASED = 0,
  CGX_FEEDBACK_OFF = 1,
  CGX_FEEDBACK_ON = 2
} cgx_feedback_t;

/* How values travel. cgx_config_fields describes each field: what it accepts and how its numbers
 * are written, its default, its documentation. A call refuses every other value. */
typedef struct cgx_config_t {
  int64_t bits;        /* of an element: 1-8, or 32: exact, whatever the compressor */
  int64_t bucket_size; /* elements that share one minimum and step */
  int64_t rounding;    /* a cgx_rounding_t */
  int64_t algorithm;   /* a cgx_algorithm_t; of an allreduce only */
  int64_t gather_bits; /* bits of the reduced values on their way back; 0: as `bits` */
  /* hierarchical: bits of values that stay on their host until it has summed them; 0: exact.
   * Segments that travel exact do so there too. */
  int64_t intra_bits;
  int64_t skip_incomplete_buckets; /* 1: a segment's last bucket, if not full, travels exact */
  /* Segments of fewer than max(CGX_SMALLEST_COMPRESSED, minimal_size) elements travel exact. */
  int64_t minimal_size;
  int64_t compressor; /* a cgx_compressor_t */
  int64_t density;    /* of sparse compressors: the share of values that travel, in billionths; 0:
                       * a hundredth */
  int64_t value_bits; /* of the values that topk and threshold send: 1-8, 16, 32; 0: 32 */
  int64_t rotation;   /* so many values are rotated by a Hadamard matrix before; 0: none */
  int64_t clip;       /* 1: ternary clips values at 2.5 times the bucket's root mean square */
  /* Of training steps; a collective ignores both, and ranks need not agree on them. */
  int64_t error_feedback; /* a cgx_feedback_t */
  int64_t residual_decay; /* the part of a residual that is added, in billionths; 0: all */
} cgx_config_t;

/* Fewer elements cost more as a bucket than exact. */
#define CGX_SMALLEST_COMPRESSED 16

/* The fields of cgx_config_t in their order, as JSON: [{"name", "default", "accepted": in words for
 * errors, "documentation": one line, "of_compressor": set for one compressor, it means nothing for
 * another, "words": {name: number}}, ...]. */
CGX_API const char* cgx_config_fields(void);
/* The name of a cgx_compressor_t, such as "topk"; "unknown" for every other number. */
CGX_API const char* cgx_compressor_name(int64_t compressor);
/* The compressors, as JSON, in the order of cgx_compressor_t: [{"name", "description", "sliced":
 * whether what it encodes can be cut, "bits": [from, to] ([0, 0]: a width of its own), "roundings":
 * [words, its own first], "knobs": [fields of the config that not all have], "biased": whether its
 * expectation with nearest rounding is not the value, "device": "", or why devices lack it}]. */
CGX_API const char* cgx_compressors(void);
/* What becomes of a collective's seed. */
typedef enum cgx_seed_use_t {
  CGX_SEED_UNUSED = 0,
  CGX_SEED_OF_NOISE = 1, /* ranks need not agree on it */
  CGX_SEED_OF_PLACES = 2 /* randk: they must */
} cgx_seed_use_t;
/* What a config makes of it: a cgx_seed_use_t. */
CGX_API cgx_status_t cgx_config_seed_use(const cgx_config_t* config, int32_t* use);
/* Whether error feedback converges with a config: CGX_INVALID_ARGUMENT, which tells why not. */
CGX_API cgx_status_t cgx_config_check_feedback(const cgx_config_t* config);
/* A config as a text: "bits=4 rounding='nearest' gather_bits=None". Names and values are separated
 * by one space and written as Python writes them; what is left out has its default. */
CGX_API cgx_status_t cgx_config_parse(const char* text, cgx_config_t* config);
/* Overrides the fields of a config that the text gives. A change of the compressor resets the
 * fields that belong to the compressor, except those that the text gives; 32 bits remain. If the
 * text gives 32 bits, error_feedback becomes CGX_FEEDBACK_IF_BIASED. An error changes nothing. */
CGX_API cgx_status_t cgx_config_override(const char* text, cgx_config_t* config);
/* All fields as a text that cgx_config_parse reads. Valid until this thread's next call. */
CGX_API cgx_status_t cgx_config_text(const cgx_config_t* config, const char** text);

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* CGX_CONFIG_H_ */
