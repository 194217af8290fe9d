"""The analytic backward pass through the blocks of Llama, Mistral, Qwen and their like."""
