/* Section 1 of the C API (cgx.h): status codes and error texts. */
#ifndef CGX_STATUS_H_
#define CGX_STATUS_H_

#if defined(_WIN32)
#error "cgx supports Linux only"
#endif
#define CGX_API __attribute__((visibility("default")))

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** The result of every function that can fail. */
typedef enum cgx_status_t {
  CGX_OK = 0,
  CGX_INVALID_ARGUMENT = 1, /**< An argument or a CGX_* variable is out of range. */
  CGX_UNSUPPORTED = 2,      /**< No kernel or transport supports this dtype, op or layout. */
  CGX_NOT_FOUND = 3,        /**< No communicator has this id or name. */
  CGX_MISMATCH = 4,         /**< Ranks called one collective with different arguments. */
  CGX_TIMEOUT = 5,          /**< A deadline passed. The communicator is closed. */
  CGX_PEER_FAILED = 6,      /**< A peer died or gave up. The communicator is closed. */
  CGX_CLOSED = 7,           /**< The communicator was closed before this call. */
  CGX_SYSTEM = 8,           /**< MPI, CUDA or the operating system returned an error. */
  CGX_INTERNAL = 9          /**< A defect in cgx: please report it. */
} cgx_status_t;

/** Return the text of the calling thread's last failure, or "" if its last call succeeded.
 *
 * The text is for people and may change between versions. Programs should branch on the status.
 *
 * @return A UTF-8 string that is valid until this thread's next call of a cgx function. */
CGX_API const char* cgx_last_error(void);

/** Return the field of cgx_config_t that caused the calling thread's last failure.
 *
 * Bindings use it to name the keyword argument at fault.
 *
 * @return The field's index in cgx_config_fields() if its value is not accepted whatever the other
 *     fields are; -1 for every other failure. */
CGX_API int32_t cgx_last_error_field(void);

/** Return the library's version, such as "0.1.0". It is equal to CGX_VERSION of the headers that
 * the library was built with. */
CGX_API const char* cgx_version(void);

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* CGX_STATUS_H_ */
