"""Pages of benchmarks, made from their JSON: `shoal bench scale|step|memory|comm --html FILE`."""
