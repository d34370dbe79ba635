"""Settings of other systems on the command line: `--deepspeed ds_config.json`, `--megatron "..."`."""
