// Bus bandwidths of SimAI's analytical mode. argv: its tables of ratios for network cards, NVLink and all-to-alls. A line of stdin: nodes,
// GPUs a node, network cards a node, GB/s of a card, GB/s of a GPU inside its node, collective, bytes. A line of stdout for each: "result",
// GB/s, and the share of them that its tables give for this size.
#include <iostream>
#include <string>

#include "astra-sim/system/calbusbw.h"

int main(int, char **argv) {
  const auto cards = readCSV(argv[1]), nvlink = readCSV(argv[2]), all_to_all = readCSV(argv[3]);
  int nodes, gpus;
  float count, card, inside;
  std::string op;
  uint64_t bytes;
  char nic[] = "CX7", group[] = "tp";  // the flat group: it has the tables of sizes, and one ring over all GPUs
  while (std::cin >> nodes >> gpus >> count >> card >> inside >> op >> bytes) {
    const BusBwResult found = cal_busbw(GPUType::H100, inside, card, count, nodes, op.data(), gpus, nic);
    const float ratio =
        cal_ratio(cards, nvlink, all_to_all, bytes, nodes * gpus, nodes * gpus, gpus, group, op.data(), found.is_nvlink);
    std::cout << "\nresult " << found.busbw << ' ' << ratio << std::endl;
  }
}
