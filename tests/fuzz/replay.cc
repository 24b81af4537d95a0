// Runs a fuzz target on all files of the given folders, without libFuzzer. `make test` runs the
// corpus this way.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "input.h"

int main(int argc, char** argv) {
  size_t files = 0;
  for (int i = 1; i < argc; ++i) {
    for (const auto& entry : std::filesystem::directory_iterator(argv[i])) {
      std::ifstream file(entry.path(), std::ios::binary);
      const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
      const std::vector<uint8_t> exactly(bytes.begin(), bytes.end());
      std::fprintf(stderr, "%s\n", entry.path().c_str());
      LLVMFuzzerTestOneInput(exactly.data(), exactly.size());
      ++files;
    }
  }
  std::printf("%zu inputs\n", files);
  return files == 0;
}
