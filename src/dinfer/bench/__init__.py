"""Benchmarks: steps against their floor, latency, throughput, and against Fast-dLLM."""
