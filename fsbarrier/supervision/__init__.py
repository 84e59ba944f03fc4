"""Programs that we start: watched, ended with all their processes, none outliving its daemon; and the files they talk by."""
