"""`python -m deployments.server`; the code is in ckpt_tasks/deploying/server.py."""

from ckpt_tasks.deploying.server import main

if __name__ == "__main__":
    raise SystemExit(main())
