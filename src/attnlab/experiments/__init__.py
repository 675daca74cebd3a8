"""Training and measuring many models: plans, jobs, the ledger, statistics and verdicts."""
