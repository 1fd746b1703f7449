"""An NPU that is emulated on the CPU, so that the real vLLM-Ascend runs on any host."""
