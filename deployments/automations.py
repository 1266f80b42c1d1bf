"""`python -m deployments.automations apply|show|remove`; the code is in ckpt_tasks/flows/site/automations.py."""

from ckpt_tasks.flows.site.automations import main

if __name__ == "__main__":
    raise SystemExit(main())
