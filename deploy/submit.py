"""What ``spark-submit`` is given: the arguments behind it are those of the command ``ledgerlake``.

spark-submit --packages io.delta:delta-spark_4.2_2.13:4.4.0 submit.py run orders.toml
"""

from ledgerlake.cli import main

raise SystemExit(main())
