"""What the gradient of each public trainer is, held against its documentation: conformance.csv."""
