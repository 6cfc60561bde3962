"""How fast a model can be on a device, from its configuration alone; for cli_plan.py."""
