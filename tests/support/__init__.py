"""What tests share: policies, oracles, dumps, runners. No test imports another test."""
