"""Only what pytest must know before it collects; everything else lives in afd_testkit."""

pytest_plugins = "pytester"
