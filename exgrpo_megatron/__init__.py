"""ExGRPO on Megatron-Core: group-relative policy optimisation with verifiable rewards and experience replay."""

__version__ = "0.1.0"
