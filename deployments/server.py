"""`python -m deployments.server`; the code is in ckpt_tasks/flows/site/prefect_server.py."""

from ckpt_tasks.flows.site.prefect_server import main

if __name__ == "__main__":
    raise SystemExit(main())
