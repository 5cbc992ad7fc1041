from melodi.cli import main

main()
