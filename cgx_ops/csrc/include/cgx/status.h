/* cgx.h, section 1: status codes, the field at fault and the error text. */
#ifndef CGX_STATUS_H_
#define CGX_STATUS_H_

#if defined(_WIN32)
#error "cgx runs on Linux"
#endif
#define CGX_API __attribute__((visibility("default")))

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cgx_status_t {
  CGX_OK = 0,
  CGX_INVALID_ARGUMENT = 1, /* a value out of its range: bits, bucket_size, CGX_* text, ... */
  CGX_UNSUPPORTED = 2,      /* a dtype, op or layout that no kernel serves */
  CGX_NOT_FOUND = 3,        /* no such communicator */
  CGX_MISMATCH = 4,         /* ranks called one collective with different arguments */
  CGX_TIMEOUT = 5,          /* a deadline passed; the communicator is closed */
  CGX_PEER_FAILED = 6,      /* a peer died or gave up; the communicator is closed */
  CGX_CLOSED = 7,           /* the communicator was closed before this call */
  CGX_SYSTEM = 8,           /* MPI or the operating system refused */
  CGX_INTERNAL = 9          /* a defect in cgx */
} cgx_status_t;

/* Text of this thread's last failure, for people: programs decide by the status. "" if none. Valid
 * until the thread's next cgx call. */
CGX_API const char* cgx_last_error(void);
/* Index of the field of cgx_config_t (its place in cgx_config_fields) whose value that failure
 * refused, whatever the other fields are; -1 for every other failure. */
CGX_API int32_t cgx_last_error_field(void);
CGX_API const char* cgx_version(void);

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* CGX_STATUS_H_ */
