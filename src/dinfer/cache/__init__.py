"""Cache policies: which rows to run. One file each; `plan(seq, window, state) -> StepPlan`."""
