"""The former place of ``ledgerlake.pipeline.worker_daemon``, which sessions of users name as
``spark.python.daemon.module``.
"""

from ledgerlake.pipeline.worker_daemon import main

if __name__ == "__main__":
    main()
