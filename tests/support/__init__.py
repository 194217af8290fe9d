"""What tests share: policies, oracles, logs, runners. No test imports another test."""
