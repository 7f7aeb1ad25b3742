"""Runs what the scheduler picked: model runner, sampler, compiled and native forms of the body."""
