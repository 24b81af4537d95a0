// The functions of cgx.h, section 4, for configs.
#include "config.h"

#include <string>

#include "api/api.h"
#include "config_codec.h"

const char* cgx_config_fields(void) {
  static const std::string text = cgx::describe_config();
  return text.c_str();
}

const char* cgx_compressor_name(int64_t compressor) { return cgx::compressor_name(compressor); }

const char* cgx_compressors(void) {
  static const std::string text = cgx::describe_compressors();
  return text.c_str();
}

cgx_status_t cgx_config_check_feedback(const cgx_config_t* config) {
  return cgx::guarded_arithmetic([&] {
    cgx::check_config(*config);
    cgx::require_feedback(*config);
  });
}

cgx_status_t cgx_config_seed_use(const cgx_config_t* config, int32_t* use) {
  return cgx::guarded_arithmetic([&] {
    cgx::check_config(*config);
    const bool exact = config->bits == cgx::kExactBits;
    const bool rounds = cgx::rounding_of(*config) != cgx::RoundingMode::kNearest;
    *use = exact                             ? CGX_SEED_UNUSED
           : config->compressor == CGX_RANDK ? CGX_SEED_OF_PLACES
           : rounds                          ? CGX_SEED_OF_NOISE
                                             : CGX_SEED_UNUSED;
  });
}

cgx_status_t cgx_config_is_exact(const cgx_config_t* config, int32_t* exact) {
  return cgx::guarded_arithmetic([&] {
    cgx::check_config(*config);
    *exact = config->bits == cgx::kExactBits || cgx::compressor_entry(config->compressor).exact;
  });
}

cgx_status_t cgx_config_parse(const char* text, cgx_config_t* config) {
  return cgx::guarded_arithmetic([&] { *config = cgx::parse_config(text ? text : ""); });
}

cgx_status_t cgx_config_override(const char* text, cgx_config_t* config) {
  return cgx::guarded_arithmetic([&] {
    cgx::check_config(*config);
    *config = cgx::override_config(*config, text ? text : "");
  });
}

cgx_status_t cgx_config_text(const cgx_config_t* config, const char** text) {
  return cgx::guarded_arithmetic([&] {
    cgx::check_config(*config);
    thread_local std::string written;
    written.clear();
    for (const cgx::ConfigField& field : cgx::config_table())
      written += cgx::join(written.empty() ? "" : " ", field.name, "=",
                           cgx::config_text(field, config->*field.value));
    *text = written.c_str();
  });
}
