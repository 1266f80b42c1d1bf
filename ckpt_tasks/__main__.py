"""`python -m ckpt_tasks` is `ckpt`, for launchers that start a module (torchrun -m, srun)."""

from ckpt_tasks.cli import main

if __name__ == "__main__":
    main()
