// Bus bandwidths of SimAI's analytical mode. argv: its ratio tables for network cards, NVLink and all-to-all. A line of
// stdin: nodes, GPUs per node, network cards per node, GB/s per card, GB/s per GPU inside a node, collective, bytes.
// A line of stdout: "result", bus bandwidth in GB/s, and the share of it that the tables give for this size.
#include <iostream>
#include <string>

#include "astra-sim/system/calbusbw.h"

int main(int, char **argv) {
  const auto cards = readCSV(argv[1]), nvlink = readCSV(argv[2]), all_to_all = readCSV(argv[3]);
  int nodes, gpus;
  float count, card, inside;
  std::string op;
  uint64_t bytes;
  char nic[] = "CX7", group[] = "tp";  // tp: one ring over all GPUs, and tables by size
  while (std::cin >> nodes >> gpus >> count >> card >> inside >> op >> bytes) {
    const BusBwResult found = cal_busbw(GPUType::H100, inside, card, count, nodes, op.data(), gpus, nic);
    const float ratio =
        cal_ratio(cards, nvlink, all_to_all, bytes, nodes * gpus, nodes * gpus, gpus, group, op.data(), found.is_nvlink);
    std::cout << "\nresult " << found.busbw << ' ' << ratio << std::endl;
  }
}
