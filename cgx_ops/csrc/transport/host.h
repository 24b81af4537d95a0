// Which machine, as far as sharing memory by process id goes: host name, boot and PID namespace.
#pragma once

#include <array>

namespace cgx {

using Host = std::array<char, 192>;

Host this_host();

}  // namespace cgx
