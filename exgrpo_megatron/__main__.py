"""`python -m exgrpo_megatron` and `torchrun -m exgrpo_megatron` are the `exgrpo` command."""

from exgrpo_megatron.cli import main

if __name__ == "__main__":
    main()
