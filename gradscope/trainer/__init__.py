"""GRPO and REINFORCE++ with Advantage Reweighting and Lopti (arXiv:2505.12929), short enough to read in one sitting."""
