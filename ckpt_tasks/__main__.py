"""`python -m ckpt_tasks` is `ckpt`: a launcher (torchrun -m, srun) starts it so."""

from ckpt_tasks.cli import main

if __name__ == "__main__":
    main()
